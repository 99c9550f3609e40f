"""Sampling parameters from the fields of a Triton request.

The default is greedy. A temperature turns sampling on. So do top_k above 1, top_p above 0 and the
other fields that narrow the choice, at temperature 1. A top_k of 1 and a temperature of 0 are
greedy. A request without a seed gets a random one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.request import Guide, SamplingParams
from slipstream.request_fields.field import PYTHON_TYPES
from slipstream.request_fields.table import COPIED
from slipstream.server.fields.limits import FieldValue
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor

NEVER = -1  # as end_id: no token ends the text


def sampling_params(
    fields: Mapping[str, FieldValue], encode_word: Callable[[str], list[int]]
) -> SamplingParams:
    """Return the sampling parameters of a request. `encode_word` returns the tokens of a text."""
    values: dict[str, Any] = {
        field.parameter: PYTHON_TYPES[field.datatype](fields[field.name].value)
        for field in COPIED
        if field.name in fields and fields[field.name].value is not None
    }
    values.setdefault("max_tokens", 0)
    if "seed" not in values:
        values["seed"] = secrets.randbits(64)
    if not values.get("top_p"):
        values["top_p"] = 1.0
    values["temperature"] = _temperature(fields, values)
    end_id = fields["end_id"].value if "end_id" in fields else None
    return SamplingParams(
        **values,
        end_ids=() if end_id in (None, NEVER) else (int(end_id),),
        logit_bias=_logit_bias(fields, encode_word),
        guide=_guide(fields),
    )


def _temperature(fields: Mapping[str, FieldValue], values: Mapping[str, Any]) -> float:
    """Return the temperature. Without one, a field that narrows the choice turns sampling on."""
    top_k = values.get("top_k", 0)
    if top_k == 1:
        return 0.0
    if "temperature" in values:
        return float(values["temperature"])
    top_p = fields["top_p"].value if "top_p" in fields else None
    narrowed = any(
        values.get(field.parameter, field.sampling_default) != field.sampling_default
        for field in COPIED
        if field.narrows
    )
    return 1.0 if top_k > 1 or (top_p or 0.0) > 0.0 or narrowed else 0.0


def sequences_of(fields: Mapping[str, FieldValue]) -> int:
    """How many answers to the one prompt are wanted."""
    return int(fields["num_return_sequences"].value) if "num_return_sequences" in fields else 1


def _guide(fields: Mapping[str, FieldValue]) -> Guide | None:
    def text(field: str) -> str:
        return fields[field].tensor.text() if field in fields else ""

    kind, guide = text("guided_decoding_guide_type"), text("guided_decoding_guide")
    if not kind and not guide:
        return None
    if kind not in KINDS:
        raise InferenceError(
            f"guided_decoding_guide_type must be one of {', '.join(KINDS)}, got '{kind}'"
        )
    if not guide and kind != "json":
        raise InferenceError(
            f"guided_decoding_guide is required where guided_decoding_guide_type is {kind}"
        )
    return Guide(kind, guide)


def cache_salt_of(fields: Mapping[str, FieldValue]) -> str:
    """Requests of different salts share nothing in the KV cache."""
    return fields["cache_salt"].tensor.text() if "cache_salt" in fields else ""


def never_ends(fields: Mapping[str, FieldValue]) -> bool:
    return "end_id" in fields and fields["end_id"].value == NEVER


def _logit_bias(
    fields: Mapping[str, FieldValue], encode_word: Callable[[str], list[int]]
) -> tuple[tuple[int, float], ...]:
    """Each word's weight is added at each of its tokens, as upstream's preprocessing does it."""
    words, weights = fields.get("embedding_bias_words"), fields.get("embedding_bias_weights")
    texts = words.tensor.texts() if words else []
    values = weights.tensor.values() if weights else []
    if len(texts) != len(values):
        raise InferenceError(
            "embedding_bias_words must have same dimension as embedding_bias_weights, "
            f"got {len(texts)} words and {len(values)} weights"
        )
    bias: dict[int, float] = {}
    for text, weight in zip(texts, values, strict=True):
        for token in encode_word(text) if text else []:
            bias[token] = bias.get(token, 0.0) + weight
    dense = fields["embedding_bias"].tensor.values() if "embedding_bias" in fields else []
    for token, weight in enumerate(dense):
        if weight:
            bias[token] = bias.get(token, 0.0) + weight
    return tuple(bias.items())


def words_size(fields: Mapping[str, FieldValue]) -> int:
    """Bytes of the words that are cut into tokens when the request is read."""
    given = fields.get("embedding_bias_words")
    return sum(map(len, given.tensor.strings())) if given is not None else 0


def words_of(fields: Mapping[str, FieldValue], field: str, comma_separated: bool) -> list[str]:
    """The words of a list; the first releases had one text for all of them, with commas between."""
    texts = fields[field].tensor.texts() if field in fields else []
    if comma_separated:
        texts = [word.strip() for text in texts for word in text.split(",")]
    return [word for word in texts if word]


def word_ids(tensor: Tensor) -> list[tuple[int, ...]]:
    """Words in the engine's layout [2, L]: all ids one after the other, then where each word ends,
    then -1s.
    """
    values = tensor.values()
    length = len(values) // 2
    ids, ends = values[:length], values[length:]
    words, start = [], 0
    for end in ends:
        if end < 0:
            break
        if not start <= end <= length:
            raise InferenceError(
                f"{tensor.name} holds offsets that do not rise, or lie outside its ids"
            )
        words.append(tuple(ids[start:end]))
        start = end
    return [word for word in words if word]


def pack_words(words: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """(L, the flat [2, L] layout) of words; the reverse of `word_ids`."""
    ids = [token for word in words for token in word]
    ends = list(itertools.accumulate(len(word) for word in words))
    length = max(1, len(ids), len(ends))
    return length, ids + [0] * (length - len(ids)) + ends + [-1] * (length - len(ends))
