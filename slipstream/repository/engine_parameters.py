"""Read the string parameters of a model and turn them into engine settings.

A value that cannot be converted is treated as unset, as in TensorRT-LLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.settings import MAX_RANK, EngineSettings
from slipstream.repository.config import ModelConfig
from slipstream.repository.problems import Problems, did_you_mean
from slipstream.repository.replicas import replica_settings
from slipstream.repository.roles import Role
from slipstream.repository.without_effect import WITHOUT_EFFECT

BATCHING_STRATEGIES = ("inflight_fused_batching", "inflight_batching", "V1", "v1")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")

# The type of each known parameter. "accepted" ones are known and have no effect.
ENGINE_PARAMETERS: dict[str, str] = {
    "gpt_model_type": "text",
    "gpt_model_path": "text",
    "engine_dir": "text",
    "encoder_model_path": "text",
    "max_beam_width": "int",
    "max_tokens_in_paged_kv_cache": "int",
    "batch_scheduler_policy": "text",
    "kv_cache_free_gpu_mem_fraction": "fraction",
    "max_num_sequences": "int",
    "max_attention_window_size": "text",
    "sink_token_length": "int",
    "exclude_input_in_output": "bool",
    "enable_kv_cache_reuse": "bool",
    "normalize_log_probs": "bool",
    "enable_chunked_context": "bool",
    "gpu_device_ids": "text",
    "decoding_mode": "text",
    "medusa_choices": "text",
    "eagle_choices": "text",
    "participant_ids": "text",
    "lora_cache_optimal_adapter_size": "int",
    "lora_cache_max_adapter_size": "int",
    "lora_cache_gpu_memory_fraction": "fraction",
    "lora_cache_host_memory_bytes": "int",
    "lora_prefetch_dir": "text",
    "kv_cache_host_memory_bytes": "int",
    "kv_cache_onboard_blocks": "bool",
    "cross_kv_cache_fraction": "fraction",
    "cancellation_check_period_ms": "int",
    "stats_check_period_ms": "int",
    "iter_stats_max_iterations": "int",
    "request_stats_max_iterations": "int",
    "gpu_weights_percent": "fraction",
    "enable_trt_overlap": "bool",
    "enable_context_fmha_fp32_acc": "bool",
    "multi_block_mode": "bool",
    "cuda_graph_mode": "bool",
    "cuda_graph_cache_size": "int",
    "speculative_decoding_fast_logits": "bool",
    "num_nodes": "int",
    "lookahead_window_size": "int",
    "lookahead_ngram_size": "int",
    "lookahead_verification_set_size": "int",
    "tokenizer_dir": "text",
    "guided_decoding_backend": "text",
    "xgrammar_tokenizer_info_path": "text",
    # share of the memory of its device, where a server has several models
    "memory_share": "fraction",
    # how embeddings are pooled, whatever the model declares
    "embedding_pooling": "text",
    # switches that only this server has; all but the first three are for debugging
    "deterministic": "bool",
    "exact_activations": "bool",
    "adaptive_lookup": "bool",
    "compressed_weights": "bool",
    "compressed_kv_cache": "bool",
    "fused_gemv": "bool",
    "mixed_graphs": "bool",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "accepted",
    "worker_path": "accepted",
    "executor_worker_path": "accepted",
}

DECODING_MODES = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "lookahead")
# Draft tokens per step with lookahead decoding and without lookahead_ngram_size.
_LOOKAHEAD_TOKENS = 4

_TOKENIZER = {"tokenizer_dir": "text", "tokenizer_type": "text"}
PARAMETERS: Mapping[Role, Mapping[str, str]] = {
    Role.ENGINE: ENGINE_PARAMETERS,
    Role.PREPROCESSING: {
        **_TOKENIZER,
        "add_special_tokens": "bool",
        "visual_model_path": "text",
        "gpt_model_path": "text",
        "engine_dir": "text",
        "max_num_images": "int",
        "multimodal_model_path": "text",
    },
    Role.POSTPROCESSING: {**_TOKENIZER, "skip_special_tokens": "bool"},
    Role.BLS: {
        "accumulate_tokens": "bool",
        "tensorrt_llm_model_name": "text",
        "tensorrt_llm_draft_model_name": "text",
        "multimodal_encoders_name": "text",
    },
    Role.ENSEMBLE: {},
}

# Parameters that a role shares with upstream's and does not read.
_UNREAD = {
    Role.PREPROCESSING: ("gpt_model_path", "engine_dir", "tokenizer_type"),
    Role.POSTPROCESSING: ("tokenizer_type",),
}
# Parameter → effect of its default, for the defaults of upstream that often surprise users.
_SURPRISING_DEFAULTS = {"exclude_input_in_output": "False: answers begin with the prompt"}

_EXPECTED = {
    "int": "an integer",
    "fraction": "a number above 0 and at most 1",
    "bool": "true or false",
}


@dataclass(frozen=True)
class Parameters:
    """The converted parameters of one model, without those that are not set or not valid."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_parameters(config: ModelConfig, role: Role, problems: Problems) -> Parameters:
    """Return the parameters of a model, with warnings about those that have no effect."""
    _warn_unfilled(config, role, problems)
    known = PARAMETERS.get(role)
    if known is None:
        return Parameters(dict(config.parameters))
    values: dict[str, Any] = {}
    for name in config.parameters:
        if name not in known:
            text = f"no such parameter, it has no effect{did_you_mean(name, known)}"
            _warn(config, problems, name, text)
            continue
        given = config.parameter(name)
        if given is None or known[name] == "accepted":
            continue
        value = _convert(known[name], given.strip())
        if value is None:
            text = f"expected {_EXPECTED[known[name]]}, got '{given}'; using the default"
            _warn(config, problems, name, text)
            continue
        values[name] = value
        ineffective = WITHOUT_EFFECT.get(name)
        if ineffective is not None and value not in ineffective.harmless:
            _warn(config, problems, name, f"'{given}' has no effect: {ineffective.reason}")
    return Parameters(values)


def _warn_unfilled(config: ModelConfig, role: Role, problems: Problems) -> None:
    """Warn about each parameter that has an effect and was not filled."""
    for name, value in config.parameters.items():
        if f"parameters.{name}" in config.unfilled and _has_effect(name, role):
            default = _SURPRISING_DEFAULTS.get(name)
            meaning = f"using the default ({default})" if default else "using the default"
            _warn(config, problems, name, f"{value} was not filled: {meaning}")


def report_unfilled(
    place: str, models: Iterable[tuple[ModelConfig, Role]], problems: Problems
) -> None:
    """Warn once about all parameters of a repository that have no effect and were not filled."""
    names: dict[str, None] = {}
    for config, role in models:
        for name in PARAMETERS.get(role, {}):  # the reader has reported the others
            if f"parameters.{name}" in config.unfilled and not _has_effect(name, role):
                names[name] = None
    if names:
        text = f"{len(names)} parameters were not filled and have no effect: {', '.join(names)}"
        problems.warn(place, 0, "parameters", text)


def _has_effect(name: str, role: Role) -> bool:
    """Return whether a parameter has an effect. Those of other models may have one."""
    known = PARAMETERS.get(role)
    if known is None:
        return True
    if name in WITHOUT_EFFECT or name in _UNREAD.get(role, ()):
        return False
    return known.get(name, "accepted") != "accepted"


def _warn(config: ModelConfig, problems: Problems, parameter: str, text: str) -> None:
    key = f"parameters.{parameter}"
    problems.warn(config.file, config.line(key), key, text)


def _error(config: ModelConfig, problems: Problems, parameter: str, text: str) -> None:
    key = f"parameters.{parameter}"
    problems.error(config.file, config.line(key), key, text)


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


# Parameter → engine setting, for counts that must be over 0.
_COUNTS = {
    "max_tokens_in_paged_kv_cache": "cache_tokens",
    "max_num_sequences": "max_rows",
    "max_beam_width": "max_beam_width",
    "kv_cache_host_memory_bytes": "host_cache_bytes",
}
# Parameter → engine setting, for values that are used as they are.
_PLAIN_SETTINGS = {
    "kv_cache_free_gpu_mem_fraction": "cache_memory_fraction",
    "memory_share": "memory_share",
    "enable_kv_cache_reuse": "reuse",
    "enable_chunked_context": "chunked",
    "enable_trt_overlap": "overlap",
    "deterministic": "deterministic",
    "exact_activations": "exact_activations",
    "adaptive_lookup": "adaptive_lookup",
    "compressed_weights": "compressed_weights",
    "compressed_kv_cache": "compressed_kv_cache",
    "fused_gemv": "fused_gemv",
    "mixed_graphs": "mixed_graphs",
}


def engine_settings(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> EngineSettings:
    """Return the engine's settings. What the repository does not set keeps the engine's default."""
    wanted: dict[str, Any] = {}
    for name, setting in _COUNTS.items():
        value = parameters.get(name, 0)
        if value > 0:
            wanted[setting] = value
        elif value < 0:
            text = f"expected a number over 0, got '{value}'; using the default"
            _warn(config, problems, name, text)
    for name, setting in _PLAIN_SETTINGS.items():
        if parameters.get(name) is not None:
            wanted[setting] = parameters.get(name)
    wanted |= _adapter_settings(config, parameters, problems)
    wanted |= _attention_settings(config, parameters, problems)
    wanted |= _lookahead_settings(config, parameters, problems)
    wanted |= _policy_settings(config, parameters, problems)
    wanted |= replica_settings(config, parameters.get("gpu_device_ids"), problems)
    _check_batching_strategy(config, parameters, problems)
    return EngineSettings(**wanted)


def _policy_settings(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> dict[str, Any]:
    policy = parameters.get("batch_scheduler_policy")
    if policy is None:
        return {}
    if policy == "static_batch":
        text = "requests join and leave at every step, as under guaranteed_no_evict"
        problems.warn(config.file, config.line("parameters.batch_scheduler_policy"), "", text)
        return {"policy": "guaranteed_no_evict"}
    if policy in POLICIES:
        return {"policy": policy}
    text = f"'{policy}' is not one of {', '.join(POLICIES)}{did_you_mean(policy, POLICIES)}"
    _error(config, problems, "batch_scheduler_policy", text)
    return {}


# Parameter → (engine setting, lowest value, highest value).
_ADAPTER_SETTINGS = {
    "lora_cache_optimal_adapter_size": ("adapter_page_rank", 1, MAX_RANK),
    "lora_cache_max_adapter_size": ("adapter_max_rank", 1, MAX_RANK),
    "lora_cache_gpu_memory_fraction": ("adapter_memory_fraction", 0.0, 1.0),
    "lora_cache_host_memory_bytes": ("adapter_host_bytes", 1, None),
}


def _adapter_settings(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    for name, (setting, low, high) in _ADAPTER_SETTINGS.items():
        value = parameters.get(name)
        if value is None:
            continue
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"{low} to {high}"
            _error(config, problems, name, f"must be {bounds}, got {value}")
        else:
            wanted[setting] = value
    largest = wanted.get("adapter_max_rank", EngineSettings.adapter_max_rank)
    if wanted.get("adapter_page_rank", EngineSettings.adapter_page_rank) > largest:
        # a page larger than the largest adapter would waste memory
        wanted["adapter_page_rank"] = largest
    return wanted


def _attention_settings(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    windows = parameters.get("max_attention_window_size")
    sinks = parameters.get("sink_token_length", 0)
    if windows is not None:
        numbers = [_convert("int", part.strip()) for part in windows.split(",")]
        if all(number is not None and number > 0 for number in numbers):
            wanted["attention_windows"] = tuple(numbers)
        else:
            text = (
                f"expected numbers over 0 separated by commas, got '{windows}'; using the default"
            )
            _warn(config, problems, "max_attention_window_size", text)
    if sinks > 0 and sinks < min(wanted.get("attention_windows", (0,))):
        wanted["sink_tokens"] = sinks
    elif sinks:
        text = f"'{sinks}' has no effect: max_attention_window_size must be set and larger"
        _warn(config, problems, "sink_token_length", text)
    return wanted


def _lookahead_settings(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> dict[str, Any]:
    mode = parameters.get("decoding_mode", "auto")
    size = parameters.get("lookahead_ngram_size")
    if mode not in DECODING_MODES:
        hint = did_you_mean(mode, DECODING_MODES)
        text = f"'{mode}' has no effect: it is not one of {', '.join(DECODING_MODES)}{hint}"
        _warn(config, problems, "decoding_mode", text)
    if mode == "lookahead":
        return {"lookup_tokens": max(1, size - 1) if size is not None else _LOOKAHEAD_TOKENS}
    if size is not None:
        text = f"'{size}' has no effect: decoding_mode is not lookahead"
        _warn(config, problems, "lookahead_ngram_size", text)
    return {}


def _check_batching_strategy(
    config: ModelConfig, parameters: Parameters, problems: Problems
) -> None:
    strategy = parameters.get("gpt_model_type")
    if strategy is not None and strategy not in BATCHING_STRATEGIES:
        allowed = ", ".join(BATCHING_STRATEGIES)
        hint = did_you_mean(strategy, BATCHING_STRATEGIES)
        text = f"Invalid gpt_model_type '{strategy}': it must be one of {allowed}{hint}"
        _error(config, problems, "gpt_model_type", text)
