"""A request of token ids, from the fields of the engine model: its own names, its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipstream.engine.request import PromptTable
from slipstream.repository.models import EngineModel
from slipstream.request_fields.field import Words
from slipstream.request_fields.table import word_bounds
from slipstream.server.fields.limits import FieldValue, check_tokens, require
from slipstream.server.fields.prompt_tables import prompt_table, table_salt
from slipstream.server.fields.retention import retention_of
from slipstream.server.fields.sampling import cache_salt_of, sampling_params, sequences_of, word_ids
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.text.pipeline import TextRequest
from slipstream.server.text.tokenizer import Tokenizer


def token_request(
    fields: Mapping[str, FieldValue], engine: EngineModel, tokenizer: Tokenizer
) -> TextRequest:
    spec = engine.engine.spec
    refuse_texts(fields, engine.name)
    table = prompt_table(fields, spec, sequences_of(fields))
    prompt = prompt_ids(fields, engine, table)
    require(fields, "max_tokens", "request_output_len")
    check_bias(fields, spec.vocab_size)
    sampling = sampling_params(fields, lambda word: tokenizer.encode(word, False))
    stop_words = word_lists(fields, "stop_words_list", word_bounds("stop_words"), spec.vocab_size)
    bad_words = word_lists(fields, "bad_words_list", word_bounds("bad_words"), spec.vocab_size)
    return TextRequest(
        prompt=prompt,
        sampling=replace(sampling, bad_words=tuple(bad_words)),
        stop_words=[tokenizer.decode(word, False) for word in stop_words],
        # the ids are what counts here, so a stop word may be a special token
        skip_special_tokens=False,
        ignore_end=not sampling.end_ids,  # the engine itself knows no end but the one it is told
        sequences=sequences_of(fields),
        prompt_table=table,
        cache_salt=cache_salt_of(fields) + table_salt(fields),
        draft=draft_ids(fields, engine),
        retention=retention_of(fields),
    )


def refuse_texts(fields: Mapping[str, FieldValue], model: str) -> None:
    for field in ("text_input", "messages"):
        if field in fields:
            raise InferenceError(
                f"{fields[field].name} is for models that take text, and {model} takes input_ids"
            )


def prompt_ids(
    fields: Mapping[str, FieldValue], engine: EngineModel, table: PromptTable | None
) -> list[int]:
    given = require(fields, "input_ids", "input_ids")
    ids = given.tensor.values()
    if "input_lengths" in fields:
        ids = ids[: fields["input_lengths"].value]
    if min(ids) < 0:
        raise InferenceError(f"{given.name} holds the id {min(ids)}, which no vocabulary has")
    check_tokens(ids, engine.engine.build.max_input_len)
    vocabulary = engine.engine.spec.vocab_size
    if table is None:
        # load generators send ids of other vocabularies
        return [token % vocabulary for token in ids]
    if max(ids) >= vocabulary + table.rows:
        last = vocabulary + table.rows - 1
        raise InferenceError(
            f"{given.name} holds the id {max(ids)}, the last of prompt_embedding_table is {last}"
        )
    return ids


def draft_ids(fields: Mapping[str, FieldValue], engine: EngineModel) -> list[int]:
    given = fields.get("draft_input_ids")
    if given is None or given.value is None:
        return []
    ids, vocabulary, longest = (
        given.tensor.values(),
        engine.engine.spec.vocab_size,
        engine.engine.build.max_seq_len,
    )
    if len(ids) > longest:
        raise InferenceError(f"{given.name} must hold at most {longest} tokens, got {len(ids)}")
    if max(ids) >= vocabulary:
        raise InferenceError(
            f"{given.name} holds the id {max(ids)}, which is not in the vocabulary of {vocabulary}"
        )
    return ids


def check_bias(fields: Mapping[str, FieldValue], vocabulary: int) -> None:
    given = fields.get("embedding_bias")
    if given is not None and len(given.tensor.data) not in (0, vocabulary):
        count = len(given.tensor.data)
        raise InferenceError(
            f"{given.name} must have a number for each of {vocabulary} tokens, got {count}"
        )


def word_lists(
    fields: Mapping[str, FieldValue], field: str, bound: Words, vocabulary: int
) -> list[tuple[int, ...]]:
    if field not in fields:
        return []
    words = word_ids(fields[field].tensor)
    if len(words) > bound.count:
        raise InferenceError(f"{field} must hold at most {bound.count} words, got {len(words)}")
    longest = max(map(len, words), default=0)
    if longest > bound.bytes:  # a token is a byte at least
        raise InferenceError(
            f"a word of {field} must have at most {bound.bytes} ids, got {longest}"
        )
    if any(not 0 <= token < vocabulary for word in words for token in word):
        raise InferenceError(
            f"{field} holds ids that are not in the vocabulary (0 to {vocabulary - 1})"
        )
    return words
