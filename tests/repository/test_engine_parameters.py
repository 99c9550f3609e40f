"""Every parameter of an engine model changes how it is served or is reported by name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_server import make_repository

from slipstream.repository.engine_parameters import ENGINE_PARAMETERS
from slipstream.repository.models import EngineModel, inspect_repository
from slipstream.repository.problems import Problem

# Parameter → a value that is not the default. Paths of upstream's programs are not in it.
VALUES = {
    "gpt_model_type": "V2",
    "gpt_model_path": "/nowhere",
    "engine_dir": "/nowhere",
    "encoder_model_path": "/encoder",
    "max_beam_width": "4",
    "max_tokens_in_paged_kv_cache": "4096",
    "batch_scheduler_policy": "max_utilization",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "max_num_sequences": "7",
    "max_attention_window_size": "100,200",
    "sink_token_length": "4",
    "exclude_input_in_output": "false",
    "enable_kv_cache_reuse": "false",
    "normalize_log_probs": "false",
    "enable_chunked_context": "false",
    "gpu_device_ids": "1",
    "decoding_mode": "lookahead",
    "medusa_choices": "{0}",
    "eagle_choices": "{0}",
    "participant_ids": "1,2",
    "lora_cache_optimal_adapter_size": "16",
    "lora_cache_max_adapter_size": "32",
    "lora_cache_gpu_memory_fraction": "0.2",
    "lora_cache_host_memory_bytes": "1000000",
    "lora_prefetch_dir": "/adapters",
    "kv_cache_host_memory_bytes": "1000000",
    "kv_cache_onboard_blocks": "false",
    "cross_kv_cache_fraction": "0.5",
    "cancellation_check_period_ms": "5",
    "stats_check_period_ms": "5",
    "iter_stats_max_iterations": "5",
    "request_stats_max_iterations": "5",
    "gpu_weights_percent": "0.5",
    "enable_trt_overlap": "false",
    "memory_share": "0.4",
    "embedding_pooling": "mean",
    "deterministic": "true",
    "exact_activations": "true",
    "adaptive_lookup": "true",
    "compressed_weights": "false",
    "compressed_kv_cache": "false",
    "fused_gemv": "false",
    "mixed_graphs": "false",
    "multi_block_mode": "false",
    "cuda_graph_cache_size": "100",
    "speculative_decoding_fast_logits": "true",
    "num_nodes": "2",
    "lookahead_window_size": "4",
    "lookahead_ngram_size": "4",
    "lookahead_verification_set_size": "4",
    "tokenizer_dir": "/nowhere",
    "guided_decoding_backend": "outlines",
    "xgrammar_tokenizer_info_path": "/info",
}
# Parameters without a warning for any value, because this server always does what they ask for.
ALWAYS_SO = {"enable_context_fmha_fp32_acc", "cuda_graph_mode"}


def read(folder: Path, parameters: dict[str, str]) -> tuple[EngineModel | None, list[Problem]]:
    repo = make_repository(folder)
    config = repo / "tensorrt_llm" / "config.pbtxt"
    lines = [
        line
        for line in config.read_text().splitlines()
        if not any(f'key: "{name}"' in line for name in parameters)
    ]
    lines += [
        f'parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}'
        for name, text in parameters.items()
    ]
    config.write_text("\n".join(lines))
    found, problems = inspect_repository(repo)
    return found.engines.get("tensorrt_llm"), [*problems.errors, *problems.warnings]


def used_values(model: EngineModel | None) -> dict:
    """Return what the parameters of a model decide."""
    if model is None:
        return {}
    return {
        **asdict(model),
        "engine_config": None,
        "tokenizer_folder": None,
        "settings": asdict(model.settings),
    }


def test_every_known_parameter_is_in_this_test():
    ignored = {name for name, kind in ENGINE_PARAMETERS.items() if kind == "accepted"}
    assert ignored == {"FORCE_CPU_ONLY_INPUT_TENSORS", "worker_path", "executor_worker_path"}
    assert set(ENGINE_PARAMETERS) == {*VALUES, *ALWAYS_SO, *ignored}


@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_changes_the_model_or_is_reported(tmp_path, name):
    plain, _ = read(tmp_path / "plain", {})
    parameters = {name: VALUES[name]}
    if name == "engine_dir":
        parameters["gpt_model_path"] = ""  # gpt_model_path is used first if both are set
    model, problems = read(tmp_path / "changed", parameters)
    reported = [problem.text for problem in problems if name in problem.key]
    assert used_values(model) != used_values(plain) or reported


def read_settings(tmp_path: Path, **parameters: str) -> dict:
    model, _ = read(tmp_path / "repo", parameters)
    assert model is not None
    return asdict(model.settings)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"max_beam_width": "4"}, {"max_beam_width": 4}),
        ({"max_tokens_in_paged_kv_cache": "4096"}, {"cache_tokens": 4096}),
        ({"kv_cache_free_gpu_mem_fraction": "0.5"}, {"cache_memory_fraction": 0.5}),
        ({"max_num_sequences": "7"}, {"max_rows": 7}),
        ({"batch_scheduler_policy": "max_utilization"}, {"policy": "max_utilization"}),
        ({"enable_kv_cache_reuse": "false"}, {"reuse": False}),
        ({"enable_chunked_context": "false"}, {"chunked": False}),
        ({"enable_trt_overlap": "false"}, {"overlap": False}),
        ({"deterministic": "true"}, {"deterministic": True}),
        ({"compressed_weights": "false"}, {"compressed_weights": False}),
        ({"compressed_kv_cache": "false"}, {"compressed_kv_cache": False}),
        ({"fused_gemv": "false"}, {"fused_gemv": False}),
        ({"mixed_graphs": "false"}, {"mixed_graphs": False}),
        (
            {},
            {
                "deterministic": False,
                "compressed_weights": True,
                "compressed_kv_cache": True,
                "fused_gemv": True,
                "mixed_graphs": True,
            },
        ),
        (
            {"max_attention_window_size": "100, 200", "sink_token_length": "4"},
            {"attention_windows": (100, 200), "sink_tokens": 4},
        ),
        (
            {"max_attention_window_size": "100", "sink_token_length": "100"},
            {"attention_windows": (100,), "sink_tokens": 0},
        ),
        ({"max_attention_window_size": "many"}, {"attention_windows": ()}),
        ({"kv_cache_host_memory_bytes": "1000000"}, {"host_cache_bytes": 1000000}),
        ({"memory_share": "0.4"}, {"memory_share": 0.4}),
        ({"decoding_mode": "lookahead"}, {"lookup_tokens": 4}),
        ({"decoding_mode": "lookahead", "lookahead_ngram_size": "8"}, {"lookup_tokens": 7}),
        ({"decoding_mode": "top_k", "lookahead_ngram_size": "8"}, {"lookup_tokens": 0}),
    ],
)
def test_parameters_become_engine_settings(tmp_path, parameters, expected):
    settings = read_settings(tmp_path, **parameters)
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens_in_paged_kv_cache",
        "max_num_sequences",
        "max_beam_width",
        "kv_cache_host_memory_bytes",
    ],
)
def test_a_negative_number_is_reported_and_the_default_used(tmp_path, name):
    plain, _ = read(tmp_path / "plain", {name: ""})
    model, problems = read(tmp_path / "changed", {name: "-4"})
    assert used_values(model) == used_values(plain)
    assert [problem.text for problem in problems if name in problem.key] == [
        "expected a number over 0, got '-4'; using the default"
    ]
