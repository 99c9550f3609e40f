"""The results of `slipstream.LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from slipstream.engine.messages import Scores
from slipstream.engine.sampling_params import SamplingParams
from slipstream.offline.guides import Parsed, parse_text
from slipstream.server.engine_link.engine import TextBeam, TextOutput, TextRequest

Logits = npt.NDArray[np.float32]
TopTokens = list[tuple[int, float]]


class Logprob(NamedTuple):
    """The log-probability of a token, and its place among all tokens, from 1."""

    logprob: float
    rank: int | None  # None: after the tokens that were requested


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt. What was not requested is None."""

    text: str
    tokens: list[int]
    finish_reason: str  # stop, length, cancelled or timeout
    prompt_tokens: int  # number of prompt tokens
    cached_tokens: int  # number of prompt tokens found in the KV cache
    log_probs: list[float] | None = None  # log-probability of each token
    top_log_probs: list[TopTokens] | None = None  # most likely tokens at each token
    prompt_log_probs: list[float] | None = None  # log-probability of each prompt token but one
    top_prompt_log_probs: list[TopTokens] | None = None  # most likely tokens at each of these
    prompt_ranks: list[int] | None = None  # place of each of these tokens, from 1
    context_logits: Logits | None = None  # float32 [prompt tokens, vocab]
    generation_logits: Logits | None = None  # float32 [tokens, vocab]
    total_log_prob: float | None = None  # log-probability of a beam, including its end token
    index: int = field(default=0, compare=False)  # among the completions of the prompt

    @property
    def token_ids(self) -> list[int]:
        """The same as `tokens`."""
        return self.tokens

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole completion."""
        if self.total_log_prob is not None:
            return self.total_log_prob
        return None if self.log_probs is None else sum(self.log_probs)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token: it and the likeliest tokens, with their log-probabilities."""
        if self.log_probs is None:
            return None
        tops = self.top_log_probs or [[] for _ in self.tokens]
        # without a likeliest token the place of a token is unknown
        return [
            _by_token(token, log_prob, None, top)
            for token, log_prob, top in zip(self.tokens, self.log_probs, tops, strict=True)
        ]

    @overload
    def parse(self) -> Any: ...
    @overload
    def parse(self, model: type[Parsed]) -> Parsed: ...
    def parse(self, model: type[Any] | None = None) -> Any:
        """Return the value of a text in JSON, or an instance of a pydantic class.

        Raises ValueError for a text that is no JSON or does not fit the class.
        """
        return parse_text(self.text, model)


@dataclass(frozen=True)
class RequestOutput(Completion):
    """The first completion of a prompt, with the others in `outputs`.

    With beam search the best one is first.
    """

    others: tuple[Completion, ...] = ()  # all completions but the first
    prompt: str | None = field(default=None, compare=False)  # None: it was given as tokens
    prompt_token_ids: list[int] = field(default_factory=list, compare=False)

    @property
    def outputs(self) -> list[Completion]:
        """All completions of the prompt, this one first."""
        return [self, *self.others]

    @property
    def finished(self) -> bool:
        """Always True: a result is complete."""
        return True

    @property
    def num_cached_tokens(self) -> int:
        """The same as `cached_tokens`."""
        return self.cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each prompt token: it and the likeliest tokens. The first one has None."""
        if self.prompt_log_probs is None:
            return None
        tokens = self.prompt_token_ids[1:]
        tops = self.top_prompt_log_probs or [[] for _ in tokens]
        ranks: Sequence[int | None] = self.prompt_ranks or [None for _ in tokens]
        columns = zip(tokens, self.prompt_log_probs, ranks, tops, strict=True)
        return [None, *[_by_token(*column) for column in columns]]


def _by_token(token: int, log_prob: float, rank: int | None, top: TopTokens) -> dict[int, Logprob]:
    found = {other: Logprob(value, place) for place, (other, value) in enumerate(top, start=1)}
    if token not in found:
        found = {token: Logprob(log_prob, rank), **found}
    return found


def request_output(
    request: TextRequest, deltas: Sequence[TextOutput], prompt_ids: list[int], vocab_size: int
) -> RequestOutput:
    """Return the result of a request from all its outputs."""
    completions = []
    for sequence in range(request.sequences):
        own = [delta for delta in deltas if delta.sequence == sequence]
        if own:
            completions.append(_completion(request.sampling, own, vocab_size))
    if deltas[-1].beams:
        log_probs = request.sampling.log_probs
        best = completions[0]
        completions = [_beam_completion(best, beam, log_probs) for beam in deltas[-1].beams]
    first, *rest = completions
    # Only the first sequence has the scores of the prompt, which all share.
    shared = {
        name: first[name]
        for name in ("prompt_log_probs", "top_prompt_log_probs", "prompt_ranks", "context_logits")
    }
    others = tuple(
        Completion(**{**other, **shared, "index": index}) for index, other in enumerate(rest, 1)
    )
    prompt = request.prompt if isinstance(request.prompt, str) else None
    return RequestOutput(**first, others=others, prompt=prompt, prompt_token_ids=prompt_ids)


def _completion(
    sampling: SamplingParams, deltas: Sequence[TextOutput], vocab_size: int
) -> dict[str, Any]:
    """Return the fields of a completion."""
    return {
        "text": "".join(delta.text for delta in deltas),
        "tokens": list(chain.from_iterable(delta.tokens for delta in deltas)),
        "finish_reason": deltas[-1].finish_reason,
        "prompt_tokens": deltas[-1].prompt_tokens,
        "cached_tokens": max(delta.cached_tokens for delta in deltas),
        "log_probs": _concatenate([delta.log_probs for delta in deltas]),
        "top_log_probs": _concatenate([delta.top_log_probs for delta in deltas]),
        **_scores(sampling, deltas, vocab_size),
    }


def merge_scores(deltas: Sequence[TextOutput]) -> Scores:
    """Return the scores of all outputs of a sequence."""
    scores = Scores()
    for delta in deltas:
        scores.merge(delta.scores or Scores())
    return scores


def _scores(
    sampling: SamplingParams, deltas: Sequence[TextOutput], vocab_size: int
) -> dict[str, Any]:
    """Return the scores that may be requested, by the names of Completion."""
    scores = merge_scores(deltas)
    found: dict[str, Any] = {
        "prompt_log_probs": scores.prompt_log_probs if sampling.prompt_log_probs else None,
        "top_prompt_log_probs": None,
        "prompt_ranks": scores.prompt_ranks if sampling.prompt_ranks else None,
    }
    if sampling.top_prompt_log_probs:
        found["top_prompt_log_probs"] = scores.top_prompt_log_probs
    for name in ("context_logits", "generation_logits"):
        found[name] = None
        if getattr(sampling, name):
            logits = np.frombuffer(getattr(scores, name), dtype=np.float32)
            found[name] = logits.reshape(-1, vocab_size)
    return found


def _beam_completion(best: dict[str, Any], beam: TextBeam, log_probs: bool) -> dict[str, Any]:
    reason = best["finish_reason"]
    return {
        **best,
        "text": beam.text,
        "tokens": beam.tokens,
        "finish_reason": beam.finish_reason if reason in ("stop", "length") else reason,
        "log_probs": beam.log_probs if log_probs else None,
        "total_log_prob": beam.total_log_prob,
    }


def _concatenate(lists: Sequence[list[Any] | None]) -> list[Any] | None:
    """Return the lists as one. None: there is no list."""
    given = [items for items in lists if items is not None]
    return list(chain.from_iterable(given)) if given else None
