"""Add the optional tensors of a language model to the templates that lack them."""

from __future__ import annotations

from pathlib import Path

from slipstream.repository.templates import fill, template

FLAGS = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_prompt_log_probs",
    "return_kv_cache_reuse_stats",
    "return_perf_metrics",
)
COUNTS = ("top_log_probs", "no_repeat_ngram_size")
TEXTS = ("guided_decoding_guide_type", "guided_decoding_guide")
OUTPUTS = {
    "finish_reason": ("STRING", "1"),
    "num_input_tokens": ("INT32", "1"),
    "num_output_tokens": ("INT32", "1"),
    "num_cached_tokens": ("INT32", "1"),
    "prompt_log_probs": ("FP32", "-1"),
    "output_top_ids": ("INT32", "-1, -1, -1"),
    "output_top_log_probs": ("FP32", "-1, -1, -1"),
    "kv_cache_alloc_new_blocks": ("INT32", "1"),
    "kv_cache_reused_blocks": ("INT32", "1"),
    "kv_cache_alloc_total_blocks": ("INT32", "1"),
    "arrival_time_ns": ("INT64", "1"),
    "first_scheduled_time_ns": ("INT64", "1"),
    "first_token_time_ns": ("INT64", "1"),
    "last_token_time_ns": ("INT64", "1"),
    "acceptance_rate": ("FP32", "1"),
    "total_accepted_draft_tokens": ("INT32", "1"),
    "total_draft_tokens": ("INT32", "1"),
}
_LAST_OUTPUT = '{ name: "generation_logits" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }'


def declare_tensors(text: str, flags: bool = True) -> str:
    """Return a configuration with the optional tensors, or with its outputs only without `flags`."""
    kinds = [
        *((name, "BOOL") for name in FLAGS),
        *((name, "INT32") for name in COUNTS),
        *((name, "STRING") for name in TEXTS),
    ]
    inputs = [
        f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ 1 ] optional: true }},'
        for name, kind in kinds
    ]
    outputs = [
        f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}'
        for name, (kind, dims) in OUTPUTS.items()
    ]
    text = text.replace(_LAST_OUTPUT, ",\n".join([_LAST_OUTPUT, *outputs]))
    if flags:
        text = text.replace("input [\n", "input [\n" + "\n".join(inputs), 1)
        text = text.replace(
            'input_map { key: "streaming"',
            "\n".join(f'input_map {{ key: "{name}" value: "{name}" }}' for name, _ in kinds)
            + '\ninput_map { key: "streaming"',
        )
    wires = "\n".join(f'output_map {{ key: "{name}" value: "{name}" }}' for name in OUTPUTS)
    return text.replace(
        'output_map { key: "sequence_length"', wires + '\noutput_map { key: "sequence_length"'
    )


def write_declared(repo: Path, engine: Path, *, flags: bool = True, **values: str) -> Path:
    """Write the five models of an engine with the optional tensors. The BLS model is `chat`."""
    settings = {
        "engine_dir": str(engine),
        "tokenizer_dir": str(engine),
        "decoupled_mode": "true",
        "exclude_input_in_output": "true",
        "bls_model_name": "chat",
        "triton_max_batch_size": "8",
        **values,
    }
    for name in ("chat", "ensemble", "preprocessing", "postprocessing", "tensorrt_llm"):
        (repo / name / "1").mkdir(parents=True)
        text = fill(template("tensorrt_llm_bls" if name == "chat" else name), settings)
        (repo / name / "config.pbtxt").write_text(declare_tensors(text, flags))
    return repo
