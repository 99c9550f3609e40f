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
from slipstream.request_fields.table import COPIED, FIELDS
from slipstream.server.fields.values import RequestFields
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor

NEVER = -1  # value of end_id: no token ends the text

# Parameters that turn sampling on, and the values that turn them off.
_NARROWING = tuple((field.parameter, field.sampling_default) for field in COPIED if field.narrows)

EncodeWord = Callable[[str], list[int]]


def sampling_params(fields: RequestFields, encode_word: EncodeWord) -> SamplingParams:
    """Return the sampling parameters of a request. `encode_word` returns the tokens of a text."""
    values: dict[str, Any] = {"max_tokens": 0}
    for name, given in fields.items():
        field = FIELDS[name]
        value = given.value if field.copied else None
        if value is not None:
            values[field.parameter] = PYTHON_TYPES[field.datatype](value)
    if "seed" not in values:
        values["seed"] = secrets.randbits(64)
    values["temperature"] = _temperature(values)
    values["top_p"] = values.get("top_p") or 1.0  # 0 means off, too
    end_id = fields.integer("end_id", NEVER)
    return SamplingParams(
        **values,
        end_ids=() if end_id == NEVER else (end_id,),
        logit_bias=_logit_bias(fields, encode_word),
        guide=_guide(fields),
    )


def _temperature(values: Mapping[str, Any]) -> float:
    """Return the temperature. Without one, a field that narrows the choice turns sampling on."""
    top_k = values.get("top_k", 0)
    if top_k == 1:
        return 0.0
    if "temperature" in values:
        return float(values["temperature"])
    narrowed = any(values.get(parameter, off) != off for parameter, off in _NARROWING)
    return 1.0 if narrowed or top_k > 1 or values.get("top_p", 0.0) > 0.0 else 0.0


def sequence_count(fields: RequestFields) -> int:
    """Return how many answers to the prompt are requested."""
    return fields.integer("num_return_sequences", 1)


def cache_salt(fields: RequestFields) -> str:
    """Return the salt. Requests with different salts share no cached blocks."""
    return fields.text("cache_salt")


def never_ends(fields: RequestFields) -> bool:
    """Return whether the request says that no token ends the text."""
    return bool(fields.value("end_id") == NEVER)


def _guide(fields: RequestFields) -> Guide | None:
    kind = fields.text("guided_decoding_guide_type")
    guide = fields.text("guided_decoding_guide")
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


def _logit_bias(fields: RequestFields, encode_word: EncodeWord) -> tuple[tuple[int, float], ...]:
    """Return the bias of tokens. A word's weight is added at each of its tokens, as upstream."""
    words = fields.texts("embedding_bias_words")
    weights = fields.numbers("embedding_bias_weights")
    if len(words) != len(weights):
        raise InferenceError(
            "embedding_bias_words must have same dimension as embedding_bias_weights, "
            f"got {len(words)} words and {len(weights)} weights"
        )
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token in encode_word(word) if word else []:
            bias[token] = bias.get(token, 0.0) + weight
    for token, weight in enumerate(fields.numbers("embedding_bias")):
        if weight:
            bias[token] = bias.get(token, 0.0) + weight
    return tuple(bias.items())


def bias_words_size(fields: RequestFields) -> int:
    """Return the bytes of the words that `sampling_params` tokenizes."""
    given = fields.get("embedding_bias_words")
    return 0 if given is None else sum(map(len, given.tensor.strings()))


def read_words(fields: RequestFields, field: str, comma_separated: bool) -> list[str]:
    """Return the words of a list. The first releases sent one text with commas between words."""
    texts = fields.texts(field)
    if comma_separated:
        texts = [word.strip() for word in ",".join(texts).split(",")]
    return [word for word in texts if word]


def unpack_words(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the words of the engine's layout [2, L]: all ids, then the ends of words, then -1."""
    values = tensor.values()
    length = len(values) // 2
    ids = values[:length]
    words = []
    start = 0
    for end in values[length:]:
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
    """Return (L, values) of words in the engine's layout [2, L]. The reverse of `unpack_words`."""
    ids = list(itertools.chain.from_iterable(words))
    ends = list(itertools.accumulate(len(word) for word in words))
    length = max(1, len(ids), len(ends))
    return length, ids + [0] * (length - len(ids)) + ends + [-1] * (length - len(ends))
