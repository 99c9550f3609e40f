"""The request fields of prompts, outputs, the KV cache and adapters, and the unsupported ones."""

from __future__ import annotations

from typing import Any

from slipstream.engine.cache.eviction import LARGEST_PRIORITY
from slipstream.request_fields.field import (
    BEAM_SEARCH,
    DRAFT_MODEL,
    LARGEST_INT,
    TOKEN_ID,
    UINT64,
    Field,
    Range,
    Words,
)


def _output_flag(name: str, help: str, **more: Any) -> Field:
    """Return a flag that asks for an optional output."""
    more.setdefault("allowed_as_parameter", True)
    more.setdefault("copied_unchanged", "parameter" in more)
    more.setdefault("default_note", "false")
    return Field(name, "BOOL", None, help, bls=True, **more)


def _retention(name: str, low: int, high: int, help: str) -> Field:
    return Field(f"retention_{name}", "INT32", Range(low, high), help)


def _unsupported(name: str, datatype: str, reason: str, **more: Any) -> Field:
    return Field(name, datatype, None, "", unsupported_reason=reason, **more)


PROMPT_FIELDS = (
    Field(
        "text_input",
        "BYTES",
        None,
        "The prompt. Of several texts, only the first is completed.",
        note="one text",
        default_note="required",
        preprocessing="QUERY",
        bls=True,
    ),
    Field(
        "messages",
        "BYTES",
        None,
        "A conversation in place of `text_input`, rendered by the model's chat template.",
        note="JSON list of messages",
        preprocessing="MESSAGES",
        bls=True,
    ),
    Field(
        "input_ids",
        "INT32",
        None,
        "The prompt of the engine model, as token ids.",
        note="token ids",
        default_note="required",
    ),
    Field(
        "input_lengths",
        "INT32",
        Range(0, LARGEST_INT, above=True),
        "How many of `input_ids` to read.",
        default_note="all",
    ),
    Field(
        "prompt_embedding_table",
        "FP16",
        None,
        "Embeddings for token ids beyond the vocabulary (prompt tuning). At most 64 MiB.",
        note="[rows, hidden size]",
        bls=True,
    ),
    Field(
        "prompt_vocab_size",
        "INT32",
        TOKEN_ID,
        "Rows of `prompt_embedding_table` to use.",
        default_note="all",
        bls=True,
    ),
    Field(
        "prompt_table_extra_id",
        "UINT64",
        UINT64,
        "Identifies the prompt table of a text model.",
        preprocessing="PROMPT_TABLE_EXTRA_ID",
        bls=True,
    ),
    Field(
        "prompt_table_extra_ids",
        "UINT64",
        UINT64,
        "Distinguishes prompts that use the same prompt table.",
    ),
)

_OUTPUTS = (
    Field(
        "stream",
        "BOOL",
        None,
        "Send each new piece of the completion as it is generated.",
        default_note="false",
        engine="streaming",
        openai="stream",
        bls=True,
    ),
    Field(
        "stop",
        "BOOL",
        None,
        "Cancel the running request that has the same id.",
        default_note="false",
    ),
    _output_flag(
        "exclude_input_in_output",
        "Leave the prompt out of the output.",
        default_note="the model's setting",
    ),
    # The engine model of the gpt repository has an input of the name that others have as an output.
    _output_flag(
        "return_log_probs",
        "Return the log-probability of each generated token.",
        engine="output_log_probs",
        parameter="log_probs",
        llm="log_probs",
    ),
    Field(
        "top_log_probs",
        "INT32",
        Range(0, 100),
        "Return the log-probabilities of this many most likely tokens at each position.",
        llm="top_log_probs",
        parameter="top_log_probs",
        copied_unchanged=True,
        conflicts=(BEAM_SEARCH, DRAFT_MODEL),
        bls=True,
        allowed_as_parameter=True,
    ),
    _output_flag(
        "return_prompt_log_probs",
        "Return the log-probability of each prompt token except the first.",
        parameter="prompt_log_probs",
        llm="prompt_log_probs",
        conflicts=(DRAFT_MODEL,),
    ),
    _output_flag(
        "return_context_logits",
        "Return the logits of each prompt token. All logits of a request: at most 256 MiB.",
        parameter="context_logits",
        llm="context_logits",
        conflicts=(DRAFT_MODEL,),
        allowed_as_parameter=False,
    ),
    _output_flag(
        "return_generation_logits",
        "Return the logits of each generated token.",
        parameter="generation_logits",
        llm="generation_logits",
        conflicts=(DRAFT_MODEL,),
        allowed_as_parameter=False,
    ),
    _output_flag(
        "return_embeddings",
        "Return `embeddings`, the pooled final states of the prompt, and generate nothing.",
    ),
    _output_flag("return_finish_reason", "Return `finish_reason`."),
    _output_flag("return_num_input_tokens", "Return `num_input_tokens`."),
    _output_flag("return_num_output_tokens", "Return `num_output_tokens`."),
    _output_flag("return_num_cached_tokens", "Return `num_cached_tokens`."),
    _output_flag("return_kv_cache_reuse_stats", "Return the number of KV-cache blocks used."),
    _output_flag("return_perf_metrics", "Return the times of the request and its draft tokens."),
)

_CACHE_AND_ADAPTERS = (
    Field(
        "cache_salt",
        "BYTES",
        Words(1, 256),
        "Requests with different salts share no cached blocks.",
        openai="cache_salt",
        llm="cache_salt",
        allowed_as_parameter=True,
    ),
    _retention(
        "token_range_starts", 0, LARGEST_INT, "First tokens of ranges of the prompt; at most 64."
    ),
    _retention("token_range_ends", -1, LARGEST_INT, "Ends of the ranges. -1: end of the prompt."),
    _retention(
        "token_range_priorities",
        0,
        LARGEST_PRIORITY,
        "Retention priorities of the ranges' blocks. Other blocks have 35.",
    ),
    _retention(
        "token_range_durations_ms",
        -1,
        LARGEST_INT,
        "How long the priorities last, in milliseconds. -1: forever.",
    ),
    _retention(
        "decode_priority", 0, LARGEST_PRIORITY, "Retention priority of the completion's blocks."
    ),
    _retention(
        "decode_duration_ms", -1, LARGEST_INT, "How long that priority lasts, in milliseconds."
    ),
    Field(
        "lora_name",
        "BYTES",
        None,
        "Name of an adapter folder.",
        note="see [Adapters](adapters.md)",
        allowed_as_parameter=True,
    ),
    Field(
        "lora_task_id",
        "UINT64",
        UINT64,
        "Number of an adapter that was sent before, or of an adapter folder. 0: none.",
        default_note="0",
        bls=True,
        allowed_as_parameter=True,
    ),
    Field(
        "lora_weights",
        "FP16",
        None,
        "Weights of an adapter. FP32 and BF16 are accepted, too.",
        note="see [Adapters](adapters.md)",
        bls=True,
    ),
    Field(
        "lora_config",
        "INT32",
        None,
        "Module, layer and rank of each row of `lora_weights`.",
        note="see [Adapters](adapters.md)",
        bls=True,
    ),
)

_EXACT_DRAFTS = "a draft token is accepted exactly when it is the one that is drawn in its place"
_DECODER_ONLY = "it runs decoder-only models of text"

_UNSUPPORTED = (
    _unsupported("draft_logits", "FP32", _EXACT_DRAFTS),
    _unsupported("draft_acceptance_threshold", "FP32", _EXACT_DRAFTS),
    _unsupported("use_draft_logits", "BOOL", _EXACT_DRAFTS, bls=True),
    _unsupported(
        "decoder_text_input", "BYTES", _DECODER_ONLY, preprocessing="DECODER_QUERY", bls=True
    ),
    _unsupported("decoder_input_ids", "INT32", _DECODER_ONLY),
    _unsupported("decoder_input_lengths", "INT32", _DECODER_ONLY),
    _unsupported("encoder_input_features", "FP16", _DECODER_ONLY),
    _unsupported("encoder_output_lengths", "INT32", _DECODER_ONLY),
    _unsupported("cross_attention_mask", "BOOL", _DECODER_ONLY),
    _unsupported("skip_cross_attn_blocks", "BOOL", _DECODER_ONLY),
    _unsupported("image_input", "FP16", _DECODER_ONLY, bls=True),
    _unsupported(
        "image_bytes_input", "UINT8", _DECODER_ONLY, preprocessing="IMAGE_BYTES", bls=True
    ),
    _unsupported("image_url_input", "BYTES", _DECODER_ONLY, preprocessing="IMAGE_URL", bls=True),
    _unsupported(
        "video_bytes_input", "UINT8", _DECODER_ONLY, preprocessing="VIDEO_BYTES", bls=True
    ),
    _unsupported("context_phase_params", "UINT8", "it computes prompt and answer itself"),
)

OUTPUT_FIELDS = {
    "Outputs": _OUTPUTS,
    "Cache and adapters": _CACHE_AND_ADAPTERS,
    "Unsupported": _UNSUPPORTED,
}
