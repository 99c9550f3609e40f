"""The bounds of every generation field, in one table, checked before anything runs; errors name the
field.

Fields go by the names of the generate endpoint (`roles.py` translates each repository generation's
tensors into them); an error says the name the client used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engine.cache.retention import LARGEST_PRIORITY
from slipstream.repository.config import ModelConfig
from slipstream.repository.roles import LATER_SPELLINGS
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

LARGEST_INT = 2**31 - 1
LONGEST_TOKEN_CHARACTERS = 256  # a prompt with more characters than this a token cannot fit, unread


@dataclass(frozen=True)
class Range:
    """A number: `low` ≤ value ≤ `high`, and finite; `above` excludes `low` itself."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def refuses(self, value: float) -> str:
        """What the value must be, where it is not; otherwise nothing."""
        if not isinstance(value, int) and not math.isfinite(value):
            return "must be a finite number"
        too_low = self.low is not None and (value <= self.low if self.above else value < self.low)
        if not too_low and (self.high is None or value <= self.high):
            return ""
        if too_low and (self.high is None or self.high == LARGEST_INT):
            return f"must be {'>' if self.above else '>='} {_digits(self.low)}"
        if self.low is None:
            return f"must be <= {_digits(self.high)}"
        return f"must be {'over' if self.above else 'at least'} {_digits(self.low)} and at most {_digits(self.high)}"


def _digits(bound: float | None) -> str:
    """All of a whole number's, however large."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class Words:
    """A list of strings."""

    count: int
    bytes: int  # of each


NUMBERS: Mapping[str, Range] = {
    "max_tokens": Range(0, LARGEST_INT, above=True),
    "min_length": Range(0, LARGEST_INT),
    "end_id": Range(-1, LARGEST_INT),
    "pad_id": Range(-1, LARGEST_INT),
    "top_k": Range(0, LARGEST_INT),
    "top_p": Range(0.0, 1.0),
    "temperature": Range(0.0, None),
    "length_penalty": Range(-16.0, 16.0),
    "repetition_penalty": Range(0.0, 100.0, above=True),
    "presence_penalty": Range(-100.0, 100.0),
    "frequency_penalty": Range(-100.0, 100.0),
    "random_seed": Range(0, 2**64 - 1),
    "embedding_bias_weights": Range(-1e4, 1e4),
    "embedding_bias": Range(-1e4, 1e4),
    "input_lengths": Range(0, LARGEST_INT, above=True),
    "top_p_min": Range(0.0, 1.0, above=True),
    "top_p_decay": Range(0.0, 1.0, above=True),
    "top_p_reset_ids": Range(-1, LARGEST_INT),
    "no_repeat_ngram_size": Range(0, 256),  # each token is compared with so many others
    "prompt_vocab_size": Range(0, LARGEST_INT),
    "prompt_table_extra_id": Range(0, 2**64 - 1),
    "prompt_table_extra_ids": Range(0, 2**64 - 1),
    "top_log_probs": Range(0, 100),
    "beam_width": Range(0, 256, above=True),
    "num_return_sequences": Range(0, 128, above=True),
    "beam_search_diversity_rate": Range(-1e4, 1e4),
    "early_stopping": Range(-LARGEST_INT, LARGEST_INT),
    "draft_input_ids": Range(0, LARGEST_INT),
    "num_draft_tokens": Range(0, 256),
    "lora_task_id": Range(0, 2**64 - 1),
    "retention_token_range_starts": Range(0, LARGEST_INT),
    "retention_token_range_ends": Range(-1, LARGEST_INT),
    "retention_token_range_priorities": Range(0, LARGEST_PRIORITY),
    "retention_token_range_durations_ms": Range(-1, LARGEST_INT),
    "retention_decode_priority": Range(0, LARGEST_PRIORITY),
    "retention_decode_duration_ms": Range(-1, LARGEST_INT),
}

MIN_P = Range(0.0, 1.0)  # generate has no such field

LISTS: Mapping[str, Words] = {
    "cache_salt": Words(1, 256),
    "bad_words": Words(256, 1024),
    "stop_words": Words(64, 1024),
    "embedding_bias_words": Words(1024, 1024),
}

_ACCEPTED_DRAFTS = "a draft token is accepted exactly when it is the one that is drawn in its place"
_DECODER_ONLY = "it runs decoder-only models of text"
# Upstream takes these, and this server never will: why. What is empty or false asks for nothing,
# and passes.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("draft_logits", "draft_acceptance_threshold", "use_draft_logits"), _ACCEPTED_DRAFTS
    ),
    **dict.fromkeys(
        (
            "decoder_text_input",
            "decoder_input_ids",
            "decoder_input_lengths",
            "encoder_input_features",
            "encoder_output_lengths",
            "cross_attention_mask",
            "skip_cross_attn_blocks",
            "image_input",
            "image_bytes_input",
            "image_url_input",
            "video_bytes_input",
        ),
        _DECODER_ONLY,
    ),
    "context_phase_params": "it computes prompt and answer itself",
}

TAKEN_AS_THEY_ARE = frozenset(
    {
        "text_input",
        "messages",
        "stream",
        "stop",
        "return_log_probs",
        "exclude_input_in_output",
        "input_ids",
        "stop_words_list",
        "bad_words_list",
        "return_context_logits",
        "return_generation_logits",
        "return_prompt_log_probs",
        "return_kv_cache_reuse_stats",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_num_cached_tokens",
        "return_finish_reason",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
        "lora_name",
        "lora_weights",
        "lora_config",
        "prompt_embedding_table",
    }
)


# A request may bring these as parameters to a model that does not declare them as inputs.
BY_PARAMETER: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "return_prompt_log_probs",
            "return_kv_cache_reuse_stats",
            "return_perf_metrics",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "return_num_cached_tokens",
            "return_finish_reason",
            "exclude_input_in_output",
            "return_log_probs",
        ),
        "BOOL",
    ),
    **dict.fromkeys(
        (
            "beam_width",
            "num_return_sequences",
            "early_stopping",
            "top_k",
            "top_p_reset_ids",
            "min_length",
            "min_tokens",
            "no_repeat_ngram_size",
            "top_log_probs",
            "end_id",
            "pad_id",
        ),
        "INT32",
    ),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "top_p_min",
            "top_p_decay",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "length_penalty",
            "beam_search_diversity_rate",
        ),
        "FP32",
    ),
    **dict.fromkeys(
        ("guided_decoding_guide_type", "guided_decoding_guide", "lora_name", "cache_salt"), "BYTES"
    ),
    **dict.fromkeys(("random_seed", "seed", "lora_task_id"), "UINT64"),
}
# the parameter request_type: the others are for engines that share the work
_WHOLE = "context_and_generation"
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "BOOL": (bool,),
    "INT32": (int,),
    "UINT64": (int,),
    "FP32": (int, float),
    "BYTES": (str,),
}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A field of a request: the name that the client used and its tensor."""

    name: str
    tensor: Tensor

    @property
    def value(self) -> Any:
        return self.tensor.first


def check_batch(request: InferRequest, config: ModelConfig) -> None:
    """A request is one prompt; in-flight batching is what puts requests together."""
    if config.max_batch_size > 0 and any(
        tensor.shape[0] != 1 for tensor in request.inputs.values()
    ):
        raise InferenceError("Inflight batching backend expects requests with batch size of 1.")


def given_fields(request: InferRequest, names: Mapping[str, str]) -> dict[str, FieldValue]:
    """The request's fields, each within its bounds. `names`: the wire's name → the field."""
    fields = {
        names.get(name, name): FieldValue(name, tensor) for name, tensor in request.inputs.items()
    }
    for name, value in request.parameters.items():
        field = LATER_SPELLINGS.get(name, name)
        if name in BY_PARAMETER and field not in fields:
            fields[field] = FieldValue(name, _tensor_of(name, BY_PARAMETER[name], value))
    for field, given in fields.items():
        _check(field, given)
    if request.parameters.get("request_type", _WHOLE) != _WHOLE:
        asked = f"request_type {request.parameters['request_type']!r}"
        raise InferenceError(
            f"{asked} is not taken by this server, which computes prompt and answer",
            Code.UNSUPPORTED,
        )
    return fields


def _tensor_of(name: str, datatype: str, value: Any) -> Tensor:
    if type(value) not in _PYTHON_TYPES[datatype]:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}")
    return Tensor(name, datatype, (1, 1), [value.encode() if isinstance(value, str) else value])


def _check(field: str, given: FieldValue) -> None:
    if field in NUMBERS:
        _check_numbers(NUMBERS[field], given)
    elif field in LISTS:
        _check_words(LISTS[field], given)
    elif field in REFUSED:
        if given.tensor.data and given.value is not False and given.value != b"":
            raise InferenceError(
                f"{given.name} is not taken by this server: {REFUSED[field]}", Code.UNSUPPORTED
            )
    elif field not in TAKEN_AS_THEY_ARE:
        raise InferenceError(f"{given.name} is not supported by this server", Code.UNSUPPORTED)


def _check_numbers(bound: Range, given: FieldValue) -> None:
    data = given.tensor.data
    if (
        len(data) > 16
        and math.isfinite(sum(data))
        and not bound.refuses(min(data))
        and not bound.refuses(max(data))
    ):
        return  # a number for each token of a vocabulary is looked at as a whole
    for value in data:
        rule = bound.refuses(value)
        if rule:
            raise InferenceError(f"{given.name} {rule}, got {value}")


def _check_words(bound: Words, given: FieldValue) -> None:
    words = given.tensor.data
    if len(words) > bound.count:
        raise InferenceError(
            f"{given.name} must hold at most {bound.count} words, got {len(words)}"
        )
    longest = max((len(word) for word in words), default=0)
    if longest > bound.bytes:
        raise InferenceError(
            f"a word of {given.name} must have at most {bound.bytes} bytes, got {longest}"
        )


def require(fields: Mapping[str, FieldValue], field: str, name: str) -> FieldValue:
    """Triton counts inputs only, so that a required one may still be missing."""
    given = fields.get(field)
    if given is None or not given.tensor.data:
        raise InferenceError(f"{name} is required")
    return given


def check_tokens(prompt: list[int], longest: int) -> None:
    if len(prompt) > longest:
        raise InferenceError(
            f"Prompt length ({len(prompt)}) exceeds maximum input length ({longest})."
        )


def check_prompt_length(given: FieldValue, max_input_tokens: int) -> None:
    """Refuse, without reading it, a text that no tokenizer could make short enough."""
    size = len(given.value)
    if size > max_input_tokens * LONGEST_TOKEN_CHARACTERS:
        text = f"Prompt length (over {max_input_tokens}, {given.name} has {size} bytes)"
        raise InferenceError(f"{text} exceeds maximum input length ({max_input_tokens}).")
