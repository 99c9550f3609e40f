"""The string parameters of an engine model, read as upstream reads them: what cannot be converted is not set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.settings import EngineSettings
from slipstream.repository.config import ModelConfig
from slipstream.repository.problems import Problems, did_you_mean
from slipstream.repository.roles import Role

BATCHING_STRATEGIES = ("inflight_fused_batching", "inflight_batching", "V1", "v1")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")

# What each known parameter holds. "accepted" ones have no meaning on this server and are read by nobody.
ENGINE_PARAMETERS: dict[str, str] = {
    "gpt_model_type": "text", "gpt_model_path": "text", "engine_dir": "text", "encoder_model_path": "accepted",
    "max_beam_width": "int", "max_tokens_in_paged_kv_cache": "int", "batch_scheduler_policy": "text",
    "kv_cache_free_gpu_mem_fraction": "fraction", "max_num_sequences": "int", "max_attention_window_size": "text",
    "sink_token_length": "int", "exclude_input_in_output": "bool", "enable_kv_cache_reuse": "bool",
    "normalize_log_probs": "bool", "enable_chunked_context": "bool", "gpu_device_ids": "text",
    "decoding_mode": "text", "medusa_choices": "text", "eagle_choices": "text", "participant_ids": "text",
    "lora_cache_optimal_adapter_size": "int", "lora_cache_max_adapter_size": "int",
    "lora_cache_gpu_memory_fraction": "fraction", "lora_cache_host_memory_bytes": "int", "lora_prefetch_dir": "text",
    "kv_cache_host_memory_bytes": "int", "kv_cache_onboard_blocks": "bool", "cross_kv_cache_fraction": "fraction",
    "cancellation_check_period_ms": "int", "stats_check_period_ms": "int", "iter_stats_max_iterations": "int",
    "request_stats_max_iterations": "int", "gpu_weights_percent": "fraction", "enable_trt_overlap": "bool",
    "enable_context_fmha_fp32_acc": "bool", "multi_block_mode": "bool", "cuda_graph_mode": "bool",
    "cuda_graph_cache_size": "int", "speculative_decoding_fast_logits": "bool", "num_nodes": "int",
    "lookahead_window_size": "int", "lookahead_ngram_size": "int", "lookahead_verification_set_size": "int",
    "tokenizer_dir": "text", "guided_decoding_backend": "text", "xgrammar_tokenizer_info_path": "text",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "accepted", "worker_path": "accepted", "executor_worker_path": "accepted",
}  # fmt: skip

# Parameters that mean something upstream and nothing here yet, with the values that ask for nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "max_beam_width": (1,), "max_attention_window_size": (), "sink_token_length": (0,),
    "kv_cache_host_memory_bytes": (0,), "gpu_weights_percent": (1.0,), "gpu_device_ids": (),
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"), "medusa_choices": (), "eagle_choices": (),
    "participant_ids": (), "num_nodes": (1,), "lora_prefetch_dir": (), "guided_decoding_backend": (),
    "tensorrt_llm_draft_model_name": (), "multimodal_encoders_name": (), "visual_model_path": (),
}  # fmt: skip

_TOKENIZER = {"tokenizer_dir": "text", "tokenizer_type": "text"}
PARAMETERS: Mapping[Role, Mapping[str, str]] = {
    Role.ENGINE: ENGINE_PARAMETERS,
    Role.PREPROCESSING: {
        **_TOKENIZER, "add_special_tokens": "bool", "visual_model_path": "text", "gpt_model_path": "text",
        "engine_dir": "text", "max_num_images": "int", "multimodal_model_path": "text",
    },
    Role.POSTPROCESSING: {**_TOKENIZER, "skip_special_tokens": "bool"},
    Role.BLS: {
        "accumulate_tokens": "bool", "tensorrt_llm_model_name": "text", "tensorrt_llm_draft_model_name": "text",
        "multimodal_encoders_name": "text",
    },
    Role.ENSEMBLE: {},
}  # fmt: skip

_EXPECTED = {"int": "an integer", "fraction": "a number over 0 and up to 1", "bool": "true or false"}


@dataclass(frozen=True)
class Parameters:
    """The parameters of one model, converted; what is not set, or cannot be converted, is absent."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_parameters(config: ModelConfig, role: Role, problems: Problems) -> Parameters:
    known = PARAMETERS.get(role)
    if known is None:
        return Parameters(dict(config.parameters))
    values: dict[str, Any] = {}
    for name in config.parameters:
        key = f"parameters.{name}"
        if name not in known:
            hint = did_you_mean(name, known)
            problems.warn(config.file, config.line(key), key, f"no such parameter, it has no effect{hint}")
            continue
        text = config.parameter(name)
        if text is None or known[name] == "accepted":
            continue
        value = _convert(known[name], text.strip())
        if value is None:
            wanted = _EXPECTED[known[name]]
            problems.warn(config.file, config.line(key), key, f"expected {wanted}, got '{text}'; using the default")
        else:
            values[name] = value
            if value not in NOT_YET.get(name, (value,)):
                problems.warn(config.file, config.line(key), key, f"'{text}' has no effect on this server yet")
    return Parameters(values)


def _convert(kind: str, text: str) -> Any:
    if kind == "text":
        return text
    if kind == "bool":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        return None
    if kind == "fraction" and not (math.isfinite(number) and 0.0 < number <= 1.0):
        return None
    return number


def engine_settings(config: ModelConfig, parameters: Parameters, problems: Problems) -> EngineSettings:
    """What the repository asks of the engine; what it leaves open stays as the engine has it."""
    wanted: dict[str, Any] = {}
    cache_tokens = parameters.get("max_tokens_in_paged_kv_cache", 0)
    if cache_tokens > 0:
        wanted["cache_tokens"] = cache_tokens
    if parameters.get("max_num_sequences", 0) > 0:
        wanted["max_rows"] = parameters.get("max_num_sequences")
    for name, setting in (
        ("kv_cache_free_gpu_mem_fraction", "cache_memory_fraction"),
        ("enable_kv_cache_reuse", "reuse"),
        ("enable_chunked_context", "chunked"),
    ):
        if parameters.get(name) is not None:
            wanted[setting] = parameters.get(name)
    policy = parameters.get("batch_scheduler_policy")
    if policy in POLICIES:
        wanted["policy"] = "guaranteed_no_evict" if policy == "static_batch" else policy
    elif policy is not None:
        key = "parameters.batch_scheduler_policy"
        allowed = ", ".join(POLICIES)
        hint = did_you_mean(policy, POLICIES)
        problems.error(config.file, config.line(key), key, f"'{policy}' is not one of {allowed}{hint}")
    _check_batching_strategy(config, parameters, problems)
    return EngineSettings(**wanted)


def _check_batching_strategy(config: ModelConfig, parameters: Parameters, problems: Problems) -> None:
    strategy = parameters.get("gpt_model_type")
    if strategy is not None and strategy not in BATCHING_STRATEGIES:
        key = "parameters.gpt_model_type"
        allowed = ", ".join(BATCHING_STRATEGIES)
        hint = did_you_mean(strategy, BATCHING_STRATEGIES)
        text = f"Invalid gpt_model_type '{strategy}': it is one of {allowed}{hint}"
        problems.error(config.file, config.line(key), key, text)
