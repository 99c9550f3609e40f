"""Sampling parameters and text requests from the fields that both endpoints have.

The defaults are OpenAI's, the bounds those of the table of request fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engine.sampling_params import Guide, SamplingParams
from slipstream.request_fields.field import LARGEST_INT, Field, Range, Words
from slipstream.request_fields.table import COPIED, number_range, word_bounds
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.kserve.tensors import single
from slipstream.server.openai.errors import field_error
from slipstream.server.openai.fields import Fields
from slipstream.server.openai.models import OpenAIModel

_SEEDS = 2**64
_SEED = Range(-(2**63), _SEEDS - 1)  # OpenAI's seeds are signed

# These have bounds or defaults of their own on OpenAI's routes.
_READ_APART = ("max_tokens", "seed")
_COPIED = tuple(field for field in COPIED if field.openai and field.openai not in _READ_APART)


def check_bound(name: str, value: float, bound: Range) -> None:
    problem = bound.problem(value)
    if problem:
        too_long_to_print = isinstance(value, int) and value.bit_length() > 64
        raise field_error(name, problem if too_long_to_print else f"{problem}, got {value}")


def read_n(fields: Fields, prompts: int = 1, name: str = "n") -> int:
    """Return the number of answers to each prompt. Their total is bounded, too."""
    given: int | None = getattr(fields, name)
    count = 1 if given is None else given
    bound = number_range("num_return_sequences")
    check_bound(name, count, bound)
    assert bound.high is not None
    if count * prompts > bound.high:
        problem = f"times the number of prompts must be at most {bound.high:g}"
        raise field_error(name, f"{problem}, got {count * prompts}")
    return count


def read_max_tokens(name: str, value: int) -> int:
    check_bound(name, value, number_range("max_tokens"))
    return value


def read_top_log_probs(name: str, value: int | None) -> int:
    """Return how many of the most likely tokens to report at each position."""
    if value is None:
        return 0
    check_bound(name, value, number_range("top_log_probs"))
    return value


def read_prompt_log_probs(fields: Fields) -> int | None:
    """Return how many likely tokens to report for each prompt token; None: no scores."""
    count = fields.prompt_logprobs
    if count is None:
        return None
    if fields.stream:
        raise field_error("prompt_logprobs", "cannot be combined with stream")
    return read_top_log_probs("prompt_logprobs", count)


def read_priority(fields: Fields) -> int:
    """Return the priority of a request. Lower ones run first, and 0 is the default."""
    priority = fields.priority or 0
    check_bound("priority", priority, Range(-LARGEST_INT, LARGEST_INT))
    return priority


def _read_allowed_tokens(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    given = fields.allowed_token_ids
    if given is None:
        return ()
    if not given:
        raise field_error("allowed_token_ids", "must hold at least one token")
    for token in (min(given), max(given)):
        check_bound("allowed_token_ids", token, Range(0, vocab_size - 1))
    return tuple(dict.fromkeys(given))


def read_stop_words(fields: Fields) -> list[str]:
    return _read_words("stop", fields.stop, word_bounds("stop_words"))


def skips_special_tokens(fields: Fields, model: OpenAIModel) -> bool:
    """Return whether the text leaves special tokens out. The default is the model's."""
    if fields.skip_special_tokens is None:
        return model.text.engine.model.skip_special_tokens
    return fields.skip_special_tokens


def _read_stop_ids(fields: Fields, model: OpenAIModel) -> list[int]:
    """Return the tokens that end an answer, besides the model's end tokens."""
    tokens = fields.stop_token_ids or []
    limit = word_bounds("stop_words").count
    if len(tokens) > limit:
        raise field_error("stop_token_ids", f"must hold at most {limit} tokens, got {len(tokens)}")
    for token in tokens:
        check_bound("stop_token_ids", token, Range(0, model.vocab_size - 1))
    hidden = model.tokenizer.special_ids if skips_special_tokens(fields, model) else frozenset()
    if fields.include_stop_str_in_output and not hidden.issuperset(tokens):
        raise field_error(
            "include_stop_str_in_output",
            "cannot show a token of stop_token_ids: give its text as stop",
        )
    return tokens


def _read_words(name: str, given: str | list[str] | None, bound: Words) -> list[str]:
    words = [given] if isinstance(given, str) else given or []
    if len(words) > bound.count:
        raise field_error(name, f"must hold at most {bound.count} words, got {len(words)}")
    longest = max((len(word.encode()) for word in words), default=0)
    if longest > bound.bytes:
        raise field_error(
            name, f"must hold words of at most {bound.bytes} bytes, got one of {longest}"
        )
    return [word for word in words if word]


def build_text_request(
    fields: Fields,
    tokens: list[int],
    sampling: SamplingParams,
    stop_words: Sequence[str],
    answers: int,
    model: OpenAIModel,
    adapter: AdapterUse | None,
) -> TextRequest:
    """Return the request for the answers to one prompt, whose tokens are given."""
    if sampling.allowed_tokens and sampling.guide is not None:
        # The engine appends text that a grammar forces without looking at the tokens.
        raise field_error("allowed_token_ids", "cannot be combined with a grammar or with tools")
    return TextRequest(
        tokens,
        sampling,
        stop_words=stop_words,
        sequences=answers,
        adapter=adapter,
        stop_ids=_read_stop_ids(fields, model),
        bad_words=_read_words("bad_words", fields.bad_words, word_bounds("bad_words")),
        show_stop_word=bool(fields.include_stop_str_in_output),
        ignore_end=bool(fields.ignore_eos),
        skip_special_tokens=skips_special_tokens(fields, model),
        priority=-read_priority(fields),
        cache_salt="".join(_read_words("cache_salt", fields.cache_salt, word_bounds("cache_salt"))),
    )


def sampling_params(
    fields: Fields,
    vocab_size: int,
    max_tokens: int,
    log_probs: bool,
    top_log_probs: int,
    guide: Guide | None = None,
) -> SamplingParams:
    if fields.seed is not None:
        check_bound("seed", fields.seed, _SEED)
    top_prompt_log_probs = read_prompt_log_probs(fields)
    return SamplingParams(
        **{field.parameter: _read_value(field, getattr(fields, field.openai)) for field in _COPIED},
        max_tokens=max_tokens,
        seed=secrets.randbits(64) if fields.seed is None else fields.seed % _SEEDS,
        logit_bias=_read_logit_bias(fields.logit_bias or {}, vocab_size),
        allowed_tokens=_read_allowed_tokens(fields, vocab_size),
        log_probs=log_probs,
        top_log_probs=top_log_probs,
        prompt_log_probs=top_prompt_log_probs is not None,
        top_prompt_log_probs=top_prompt_log_probs or 0,
        prompt_ranks=top_prompt_log_probs is not None,
        guide=guide,
    )


def _read_value(field: Field, value: Any) -> Any:
    """Return the checked value of a request, or the field's default if the request has none.

    Floats are rounded to FP32, as in Triton's tensors: a value means the same on every protocol.
    """
    if value is None:
        return field.sampling_default if field.openai_default is None else field.openai_default
    if field.name == "top_k" and value == -1:  # means "off" on other servers
        return 0
    if field.datatype == "FP32":
        value = single(value)
    check_bound(field.openai, value, number_range(field.name))
    return value


def _read_logit_bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    limit = word_bounds("embedding_bias_words").count
    if len(given) > limit:
        raise field_error("logit_bias", f"must hold at most {limit} tokens, got {len(given)}")
    weights = number_range("embedding_bias_weights")
    for token, weight in given.items():
        is_number = token.isascii() and token.isdigit() and len(token) < 10
        if not is_number or int(token) >= vocab_size:
            problem = f"must have ids of tokens (0 to {vocab_size - 1}) as keys"
            raise field_error("logit_bias", f"{problem}, got '{token[:40]}'")
        check_bound("logit_bias", weight, weights)
    return tuple((int(token), weight) for token, weight in given.items())
