"""How an answer is written, from the fields that both APIs have: OpenAI's defaults, and the bounds
of generate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engine.request import Guide, SamplingParams
from slipstream.request_fields.field import Field, Range, Words
from slipstream.request_fields.table import COPIED, number_range, word_bounds
from slipstream.server.fields.adapters import AdapterUse
from slipstream.server.kserve.tensors import single
from slipstream.server.openai.errors import refused
from slipstream.server.openai.fields import ChatFields, Fields
from slipstream.server.openai.models import NamedModel
from slipstream.server.text.pipeline import TextRequest

_GUIDES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf_grammar",
}
_SEEDS = 2**64
_SEED = Range(-(2**63), _SEEDS - 1)  # OpenAI's are signed
# The fields that are read apart have other bounds or defaults.
_READ_APART = ("max_tokens", "seed")
_COPIED = tuple(field for field in COPIED if field.openai and field.openai not in _READ_APART)


def bounded(name: str, value: float, bound: Range) -> None:
    huge = isinstance(value, int) and value.bit_length() > 64  # too long to be told
    rule = bound.problem(value)
    if rule:
        raise refused(name, rule if huge else f"{rule}, got {value}")


def answers_of(fields: Fields, prompts: int = 1) -> int:
    """How many answers to each prompt; all together are bounded, too."""
    count, most = 1 if fields.n is None else fields.n, number_range("num_return_sequences")
    bounded("n", count, most)
    assert most.high is not None
    if count * prompts > most.high:
        raise refused(
            "n", f"times the number of prompts must be at most {most.high:g}, got {count * prompts}"
        )
    return count


def stop_words_of(fields: Fields) -> list[str]:
    return _words("stop", fields.stop, word_bounds("stop_words"))


def stop_ids_of(fields: Fields, model: NamedModel) -> list[int]:
    """Tokens that end an answer as the model's own end marks do: they are no part of it."""
    given, most, vocabulary = (
        fields.stop_token_ids or [],
        word_bounds("stop_words").count,
        model.vocab_size,
    )
    if len(given) > most:
        raise refused("stop_token_ids", f"must hold at most {most} tokens, got {len(given)}")
    for token in given:
        bounded("stop_token_ids", token, Range(0, vocabulary - 1))
    if fields.include_stop_str_in_output and not model.tokenizer.special_ids.issuperset(given):
        raise refused(
            "include_stop_str_in_output",
            "cannot show a token of stop_token_ids: give its text as stop",
        )
    return given


def _words(name: str, given: str | list[str] | None, bound: Words) -> list[str]:
    words = [given] if isinstance(given, str) else given or []
    if len(words) > bound.count:
        raise refused(name, f"must hold at most {bound.count} words, got {len(words)}")
    longest = max((len(word.encode()) for word in words), default=0)
    if longest > bound.bytes:
        raise refused(name, f"must hold words of at most {bound.bytes} bytes, got one of {longest}")
    return [word for word in words if word]


def text_request(
    fields: Fields,
    tokens: list[int],
    sampling: SamplingParams,
    stop_words: Sequence[str],
    answers: int,
    model: NamedModel,
    adapter: AdapterUse | None,
) -> TextRequest:
    return TextRequest(
        tokens,
        sampling,
        stop_words=stop_words,
        sequences=answers,
        adapter=adapter,
        stop_ids=stop_ids_of(fields, model),
        bad_words=_words("bad_words", fields.bad_words, word_bounds("bad_words")),
        show_stop_word=bool(fields.include_stop_str_in_output),
        ignore_end=bool(fields.ignore_eos),
        cache_salt="".join(_words("cache_salt", fields.cache_salt, word_bounds("cache_salt"))),
    )


def sampling_of(
    fields: Fields,
    vocab_size: int,
    max_tokens: int,
    log_probs: bool,
    top: int,
    guide: Guide | None = None,
) -> SamplingParams:
    if fields.seed is not None:
        bounded("seed", fields.seed, _SEED)
    return SamplingParams(
        **{field.parameter: _value(field, getattr(fields, field.openai)) for field in _COPIED},
        max_tokens=max_tokens,
        seed=secrets.randbits(64) if fields.seed is None else fields.seed % _SEEDS,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        log_probs=log_probs,
        top_log_probs=top,
        guide=guide,
    )


def _value(field: Field, value: Any) -> Any:
    """Return the checked value of a request, or the field's default if the request has none.

    Floats are rounded to FP32, which Triton's tensors hold: a value means the same on both APIs.
    """
    if value is None:
        return field.sampling_default if field.openai_default is None else field.openai_default
    if field.name == "top_k" and value == -1:  # other servers' value for "off"
        return 0
    if field.datatype == "FP32":
        value = single(value)
    bounded(field.openai, value, number_range(field.name))
    return value


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    most = word_bounds("embedding_bias_words").count
    if len(given) > most:
        raise refused("logit_bias", f"must hold at most {most} tokens, got {len(given)}")
    for token, weight in given.items():
        if not (
            token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size
        ):
            raise refused(
                "logit_bias",
                f"must have ids of tokens (0 to {vocab_size - 1}) as keys, got '{token[:40]}'",
            )
        bounded("logit_bias", weight, number_range("embedding_bias_weights"))
    return tuple((int(token), weight) for token, weight in given.items())


def guide_of(fields: Fields) -> tuple[str, Guide | None]:
    """What `response_format` or one of the `guided_` fields asks for, and which: it is enforced
    token by token.
    """
    guides = {
        name: Guide(kind, value if isinstance(value, str) else json.dumps(value))
        for name, kind in _GUIDES.items()
        if (value := getattr(fields, name)) is not None
    }
    given = fields.response_format if isinstance(fields, ChatFields) else None
    if given is not None and (guide := _format_guide(given)) is not None:
        guides["response_format"] = guide
    if len(guides) > 1:
        raise refused(list(guides)[-1], f"cannot be given together with {next(iter(guides))}")
    return next(iter(guides.items()), ("", None))


def _format_guide(given: Mapping[str, Any]) -> Guide | None:
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refused(
            "response_format.type",
            f"must be text, json_object or json_schema, got {json.dumps(kind)[:40]}",
        )
    for name in given:
        # what looks like a promise and is none is not passed over
        if name != "type" and name != kind:
            raise refused(f"response_format.{name[:40]}", f"does not go with type {kind}")
    if kind != "json_schema":
        return Guide("json", "") if kind == "json_object" else None
    wrapped: Any = given.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        raise refused("response_format.json_schema.schema", "must be an object, the JSON schema")
    return Guide("json_schema", json.dumps(schema))


def top_of(name: str, value: int | None) -> int:
    """How many of the likeliest tokens are told besides the one that was taken."""
    if value is None:
        return 0
    bounded(name, value, number_range("top_log_probs"))
    return value


def max_tokens_of(name: str, value: int) -> int:
    bounded(name, value, number_range("max_tokens"))
    return value
