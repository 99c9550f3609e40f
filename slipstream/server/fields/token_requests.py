"""Requests of token ids, from the fields of the engine model."""

from __future__ import annotations

from dataclasses import replace

from slipstream.engine.cache.eviction import Retention, RetentionPriority, RetentionRange
from slipstream.engine.request import PromptTable
from slipstream.repository.models import EngineModel
from slipstream.request_fields.field import Words
from slipstream.request_fields.table import word_bounds
from slipstream.server.engine_link.engine import TextRequest
from slipstream.server.fields.prompts import prompt_table_salt, read_prompt_table
from slipstream.server.fields.values import (
    RequestFields,
    cache_salt,
    check_tokens,
    sampling_params,
    sequence_count,
    unpack_words,
)
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.text.tokenizer import Tokenizer

_RANGES = "retention_token_range_"
_UNSET = -1  # value of retention fields: no end, or no duration
_MAX_RANGES = 64  # every block is compared with every range


def token_request(fields: RequestFields, engine: EngineModel, tokenizer: Tokenizer) -> TextRequest:
    spec = engine.engine_config.spec
    _refuse_texts(fields, engine.name)
    table = read_prompt_table(fields, spec, sequence_count(fields))
    prompt = _read_prompt(fields, engine, table)
    fields.require("max_tokens", "request_output_len")
    _check_bias(fields, spec.vocab_size)
    sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
    stop_words = read_word_list(
        fields, "stop_words_list", word_bounds("stop_words"), spec.vocab_size
    )
    bad_words = read_word_list(fields, "bad_words_list", word_bounds("bad_words"), spec.vocab_size)
    return TextRequest(
        prompt=prompt,
        sampling=replace(sampling, bad_words=tuple(bad_words)),
        stop_words=[tokenizer.decode(word, False) for word in stop_words],
        # Stop words are compared as ids, so that one may be a special token.
        skip_special_tokens=False,
        # The engine model has no end token except the one of the request.
        ignore_end=not sampling.end_ids,
        sequences=sequence_count(fields),
        prompt_table=table,
        cache_salt=cache_salt(fields) + prompt_table_salt(fields),
        draft=_read_draft(fields, engine),
        retention=read_retention(fields),
    )


def _refuse_texts(fields: RequestFields, model: str) -> None:
    for field in ("text_input", "messages"):
        if field in fields:
            raise InferenceError(
                f"{fields[field].name} is for models that take text, and {model} takes input_ids"
            )


def _read_prompt(
    fields: RequestFields, engine: EngineModel, table: PromptTable | None
) -> list[int]:
    given = fields.require("input_ids", "input_ids")
    data = given.tensor.array()
    if "input_lengths" in fields:
        data = data[: fields["input_lengths"].value]
    lowest = data.min(initial=0)
    if lowest < 0:
        raise InferenceError(f"{given.name} holds the id {lowest}, which no vocabulary has")
    check_tokens(data, engine.engine_config.build.max_input_len)
    ids: list[int] = data.tolist()
    vocab_size = engine.engine_config.spec.vocab_size
    if table is None:
        # Load generators send ids of other vocabularies.
        return [token % vocab_size for token in ids]
    last = vocab_size + table.rows - 1
    if max(ids) > last:
        raise InferenceError(
            f"{given.name} holds the id {max(ids)}, the last of prompt_embedding_table is {last}"
        )
    return ids


def _read_draft(fields: RequestFields, engine: EngineModel) -> list[int]:
    given = fields.given("draft_input_ids")
    if given is None:
        return []
    count = len(given.tensor.data)
    longest = engine.engine_config.build.max_seq_len
    if count > longest:
        raise InferenceError(f"{given.name} must hold at most {longest} tokens, got {count}")
    ids = given.tensor.values()
    vocab_size = engine.engine_config.spec.vocab_size
    if max(ids) >= vocab_size:
        raise InferenceError(
            f"{given.name} holds the id {max(ids)}, which is not in the vocabulary of {vocab_size}"
        )
    return ids


def _check_bias(fields: RequestFields, vocab_size: int) -> None:
    given = fields.get("embedding_bias")
    if given is None:
        return
    count = len(given.tensor.data)
    if count not in (0, vocab_size):
        raise InferenceError(
            f"{given.name} must have a number for each of {vocab_size} tokens, got {count}"
        )


def read_word_list(
    fields: RequestFields, field: str, bound: Words, vocab_size: int
) -> list[tuple[int, ...]]:
    """Return the words of stop_words_list or bad_words_list, as token ids."""
    if field not in fields:
        return []
    most = 2 * bound.count * bound.bytes  # the ids of all words, and the ends of the words
    if (count := len(fields[field].tensor.data)) > most:
        raise InferenceError(f"{field} must hold at most {most} numbers, got {count}")
    words = unpack_words(fields[field].tensor)
    if len(words) > bound.count:
        raise InferenceError(f"{field} must hold at most {bound.count} words, got {len(words)}")
    longest = max(map(len, words), default=0)
    if longest > bound.bytes:  # a token has at least one byte
        raise InferenceError(
            f"a word of {field} must have at most {bound.bytes} ids, got {longest}"
        )
    for word in words:
        if min(word) < 0 or max(word) >= vocab_size:
            raise InferenceError(
                f"{field} holds ids that are not in the vocabulary (0 to {vocab_size - 1})"
            )
    return words


def read_retention(fields: RequestFields) -> Retention | None:
    """Return the retention priorities of a request's blocks in the KV cache, if it has any."""
    for name in ("starts", "ends", "priorities", "durations_ms"):
        given = fields.get(f"{_RANGES}{name}")
        if given is not None and len(given.tensor.data) > _MAX_RANGES:
            raise InferenceError(
                f"{_RANGES}{name} must hold at most {_MAX_RANGES} ranges, "
                f"got {len(given.tensor.data)}"
            )
    starts = fields.numbers(f"{_RANGES}starts")
    ends = fields.numbers(f"{_RANGES}ends")
    priorities = fields.numbers(f"{_RANGES}priorities")
    durations = fields.numbers(f"{_RANGES}durations_ms") or [_UNSET] * len(starts)
    if not len(starts) == len(ends) == len(priorities) == len(durations):
        counts = f"{len(starts)}, {len(ends)}, {len(priorities)} and {len(durations)}"
        names = f"{_RANGES}starts, ends, priorities and durations_ms"
        raise InferenceError(f"{names} must be of one length, got {counts}")
    ranges = []
    for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True):
        if end != _UNSET and end <= start:
            raise InferenceError(
                f"{_RANGES}ends must be over {_RANGES}starts, got {end} and {start}"
            )
        ranges.append(
            RetentionRange(start, None if end == _UNSET else end, _keep(priority, duration))
        )
    output = _read_output_retention(fields)
    return Retention(tuple(ranges), output) if ranges or output is not None else None


def _read_output_retention(fields: RequestFields) -> RetentionPriority | None:
    priority = fields.value("retention_decode_priority")
    duration = fields.value("retention_decode_duration_ms")
    if priority is None:
        if duration is not None:
            raise InferenceError("retention_decode_duration_ms needs retention_decode_priority")
        return None
    return _keep(priority, _UNSET if duration is None else duration)


def _keep(priority: int, duration: int) -> RetentionPriority:
    return RetentionPriority(priority, None if duration == _UNSET else duration)
