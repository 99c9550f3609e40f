"""A small model guesses, a large one decides: the text is the large one's, in fewer of its steps.

Turn by turn the draft model writes a few tokens and the target model verifies them all at once. A
guess is accepted exactly when it is the token that the target draws in its place, so that nothing
of the text depends on the drafts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from slipstream.engine.messages import EngineInfo, Timing
from slipstream.engine.request import SamplingParams
from slipstream.request_fields.field import DRAFT_MODEL
from slipstream.request_fields.table import conflicting_parameter
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.text.pipeline import PromptError
from slipstream.server.text.stops import StopWords
from slipstream.server.text.stream import TextStream
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer


class Generates(Protocol):
    """What answers requests."""

    def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]: ...


class Sized(Protocol):
    info: EngineInfo | None


class Target(Generates, Protocol):
    @property
    def engine(self) -> Sized: ...


class DraftedGenerator:
    """Generates as `target` does, with `count` guesses of `draft` a turn."""

    def __init__(self, target: Target, tokenizer: Tokenizer, draft: Generates, count: int) -> None:
        self._target, self._tokenizer, self._draft, self._count = target, tokenizer, draft, count

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]:
        check(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await in_thread_if_long(
                len(prompt), self._tokenizer.encode, prompt, request.add_special_tokens
            )
        # one turn does not see how long all of them become
        if self._target.engine.info is not None:
            room = max(1, self._target.engine.info.max_sequence_tokens - len(prompt))
            request = replace(
                request,
                sampling=replace(
                    request.sampling, max_tokens=min(request.sampling.max_tokens, room)
                ),
            )
        stream = TextStream(
            self._tokenizer,
            StopWords(request.stop_words, request.show_stop_word),
            request.skip_special_tokens,
        )
        answer: list[int] = []
        cached = 0
        timing: Timing | None = None
        while True:
            turn = await self._turn(request, prompt, answer)
            used = stream.tokens_used
            answer += turn.tokens
            turn.text = stream.push(turn.tokens)
            over = (
                turn.finish_reason != "length"
                or len(answer) >= request.sampling.max_tokens
                or not turn.tokens
            )
            if over or stream.stopped:
                turn.text += stream.finish()
            if stream.stopped:
                count = max(0, stream.tokens_used - used)
                turn.tokens, turn.finish_reason, over = turn.tokens[:count], "stop", True
                turn.log_probs = None if turn.log_probs is None else turn.log_probs[:count]
            turn.finish_reason = turn.finish_reason if over else ""
            cached = cached or turn.cached_tokens
            turn.prompt_tokens, turn.cached_tokens = len(prompt), cached
            timing = turn.timing = _together(timing, turn.timing)
            yield turn
            if over:
                return

    async def _turn(self, request: TextRequest, prompt: list[int], answer: list[int]) -> TextOutput:
        """What the target makes of the next guesses, as one delta without a text."""
        left = request.sampling.max_tokens - len(answer)
        guesses: list[int] = []
        if left > 1:
            asked = _next(request, prompt, answer, min(self._count, left - 1))
            try:
                # it fits the target only
                guesses = (await _whole(self._draft, replace(asked, adapter=None))).tokens
            except PromptError:  # the draft model takes less than the target, which goes on alone
                guesses = []
        wanted = _next(request, prompt, answer, min(len(guesses) + 1, left))
        return await _whole(self._target, replace(wanted, draft=guesses))


def check(request: TextRequest) -> None:
    """Each turn is a request of its own, with the answer so far in its prompt: what looks at the
    answer alone fails.
    """
    other = conflicting_parameter(request.sampling, DRAFT_MODEL)
    if request.sequences > 1:
        other = "num_return_sequences"
    elif request.bad_words:
        other = "bad_words"
    if other:
        raise InferenceError(f"{other} cannot be combined with {DRAFT_MODEL}", Code.UNSUPPORTED)


def _next(request: TextRequest, prompt: list[int], answer: list[int], count: int) -> TextRequest:
    given = request.sampling
    sampling: SamplingParams = replace(
        given, max_tokens=count, min_tokens=max(0, given.min_tokens - len(answer))
    )
    return replace(
        request, prompt=prompt + answer, sampling=sampling, stop_words=(), skip_special_tokens=False
    )


def _together(earlier: Timing | None, last: Timing | None) -> Timing | None:
    """The times of all turns as those of one request."""
    if earlier is None or last is None:
        return last
    return replace(
        earlier,
        last_token_ns=last.last_token_ns,
        allocated_blocks=earlier.allocated_blocks + last.allocated_blocks,
        draft_tokens=earlier.draft_tokens + last.draft_tokens,
        accepted_draft_tokens=earlier.accepted_draft_tokens + last.accepted_draft_tokens,
    )


async def _whole(generator: Generates, request: TextRequest) -> TextOutput:
    """All deltas of a request in one; its text is not used."""
    whole = TextOutput()
    async with aclosing(generator.generate(request)) as deltas:
        async for delta in deltas:
            whole.tokens += delta.tokens
            if delta.log_probs is not None:
                whole.log_probs = (whole.log_probs or []) + delta.log_probs
            whole.cached_tokens = max(whole.cached_tokens, delta.cached_tokens)
            whole.finish_reason, whole.error, whole.lost = (
                delta.finish_reason,
                delta.error,
                delta.lost,
            )
            whole.timing = delta.timing
    return whole
