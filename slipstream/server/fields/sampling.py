"""Sampling parameters from the fields of a request, as upstream means them where it is sane.

Nothing given is greedy. A temperature alone samples; so do top_k over 1 and top_p over 0, at
temperature 1. top_k 1 and temperature 0 are greedy. Without a seed every request draws its own.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.request import Guide, SamplingParams
from slipstream.server.fields.limits import FieldValue
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor

NEVER = -1  # as end_id: no token ends the text


def sampling_params(
    fields: Mapping[str, FieldValue], encode_word: Callable[[str], list[int]]
) -> SamplingParams:
    def value(field: str, default: float) -> float:
        return (
            fields[field].value if field in fields and fields[field].value is not None else default
        )

    temperature, top_k, top_p = _how_to_choose(fields)
    end_id = int(value("end_id", NEVER))
    return SamplingParams(
        max_tokens=int(value("max_tokens", 0)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        top_p_decay=value("top_p_decay", 1.0),
        top_p_min=value("top_p_min", 1e-6),
        top_p_reset_id=int(value("top_p_reset_ids", -1)),
        seed=int(value("random_seed", 0)) if "random_seed" in fields else secrets.randbits(64),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        min_tokens=int(value("min_length", 0)),
        no_repeat_ngram=int(value("no_repeat_ngram_size", 0)),
        end_ids=() if end_id == NEVER else (end_id,),
        logit_bias=_logit_bias(fields, encode_word),
        log_probs=bool(value("return_log_probs", False)),
        top_log_probs=int(value("top_log_probs", 0)),
        prompt_log_probs=bool(value("return_prompt_log_probs", False)),
        context_logits=bool(value("return_context_logits", False)),
        generation_logits=bool(value("return_generation_logits", False)),
        guide=_guide(fields),
        beam_width=int(value("beam_width", 1)),
        length_penalty=value("length_penalty", 0.0),
        early_stopping=int(value("early_stopping", 1)),
        diversity_rate=value("beam_search_diversity_rate", 0.0),
    )


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


def _how_to_choose(fields: Mapping[str, FieldValue]) -> tuple[float, int, float]:
    """(temperature, top_k, top_p) of SamplingParams, where 0, 0 and 1 mean greedy, off and off."""
    temperature = fields["temperature"].value if "temperature" in fields else None
    top_k = int(fields["top_k"].value or 0) if "top_k" in fields else 0
    top_p = float(fields["top_p"].value or 0.0) if "top_p" in fields else 0.0
    decay = float(fields["top_p_decay"].value or 1.0) if "top_p_decay" in fields else 1.0
    if temperature is None:
        temperature = 1.0 if top_k > 1 or top_p > 0.0 or decay < 1.0 else 0.0
    if top_k == 1:
        temperature = 0.0
    return float(temperature), top_k, top_p if top_p > 0.0 else 1.0


def _logit_bias(
    fields: Mapping[str, FieldValue], encode_word: Callable[[str], list[int]]
) -> tuple[tuple[int, float], ...]:
    """Each word's weight is added at each of its tokens, as upstream's preprocessing does it."""
    words, weights = fields.get("embedding_bias_words"), fields.get("embedding_bias_weights")
    texts = words.tensor.texts() if words else []
    values = weights.tensor.data if weights else []
    if len(texts) != len(values):
        raise InferenceError(
            "embedding_bias_words must have same dimension as embedding_bias_weights, "
            f"got {len(texts)} words and {len(values)} weights"
        )
    bias: dict[int, float] = {}
    for text, weight in zip(texts, values, strict=True):
        for token in encode_word(text) if text else []:
            bias[token] = bias.get(token, 0.0) + weight
    dense = fields["embedding_bias"].tensor.data if "embedding_bias" in fields else []
    for token, weight in enumerate(dense):
        if weight:
            bias[token] = bias.get(token, 0.0) + weight
    return tuple(bias.items())


def words_size(fields: Mapping[str, FieldValue]) -> int:
    """Bytes of the words that are cut into tokens when the request is read."""
    given = fields.get("embedding_bias_words")
    return sum(map(len, given.tensor.data)) if given is not None else 0


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
    length = len(tensor.data) // 2
    ids, ends = tensor.data[:length], tensor.data[length:]
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
