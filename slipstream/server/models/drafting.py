"""Drafting with a second model: a small model proposes tokens, and the large one verifies them.

In each round the draft model generates a few tokens, and the target model verifies all of them in
one step. A draft token is accepted exactly when the target samples the same token, so the drafts
never change the text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from slipstream.engine.messages import EngineInfo, Timing
from slipstream.request_fields.field import DRAFT_MODEL
from slipstream.request_fields.table import conflicting_parameter
from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.models.generating import Generates
from slipstream.server.text.pipeline import PromptError
from slipstream.server.text.stream import StopWords, TextStream
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.text.tokenizer import Tokenizer


class _SizedEngine(Protocol):
    @property
    def info(self) -> EngineInfo | None: ...


class Target(Generates, Protocol):
    @property
    def client(self) -> _SizedEngine: ...


class DraftedGenerator:
    """Generates the text of `target`, with `count` draft tokens of `draft` in each round."""

    def __init__(self, target: Target, tokenizer: Tokenizer, draft: Generates, count: int) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._draft = draft
        self._count = count

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]:
        check(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = await in_thread_if_long(
                len(prompt), self._tokenizer.encode, prompt, request.add_special_tokens
            )
        request = self._limit_to_context(request, len(prompt))
        stop_words = StopWords(request.stop_words, request.show_stop_word)
        stream = TextStream(self._tokenizer, stop_words, request.skip_special_tokens)
        tokens: list[int] = []
        cached = 0
        timing: Timing | None = None
        finished = False
        while not finished:
            output = await self._run_round(request, prompt, tokens)
            finished = _advance(stream, output, tokens, request.sampling.max_tokens)
            cached = cached or output.cached_tokens
            timing = _join_timings(timing, output.timing)
            output.prompt_tokens = len(prompt)
            output.cached_tokens = cached
            output.timing = timing
            yield output

    def _limit_to_context(self, request: TextRequest, prompt_tokens: int) -> TextRequest:
        """Return the request with `max_tokens` that fit the context: a round sees only its own."""
        info = self._target.client.info
        if info is None:
            return request
        room = max(1, info.max_sequence_tokens - prompt_tokens)
        sampling = request.sampling
        return replace(
            request, sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room))
        )

    async def _run_round(
        self, request: TextRequest, prompt: list[int], tokens: list[int]
    ) -> TextOutput:
        """Return the target's tokens after the next draft tokens, as one output without a text."""
        left = request.sampling.max_tokens - len(tokens)
        draft: list[int] = []
        if left > 1:
            draft_request = _round_request(request, prompt, tokens, min(self._count, left - 1))
            try:
                # an adapter fits the target only
                whole = await _collect(self._draft, replace(draft_request, adapter=None))
                draft = whole.tokens
            except PromptError:
                draft = []  # the draft model has a shorter context than the target
        target_request = _round_request(request, prompt, tokens, min(len(draft) + 1, left))
        return await _collect(self._target, replace(target_request, draft=draft))


def _advance(stream: TextStream, output: TextOutput, tokens: list[int], max_tokens: int) -> bool:
    """Add the tokens of a round to `tokens`, and its text to the output.

    Return whether it is the last round.
    """
    used = stream.tokens_used
    tokens += output.tokens
    output.text = stream.push(output.tokens)
    finished = output.finish_reason != "length" or len(tokens) >= max_tokens or not output.tokens
    if finished or stream.stopped:
        output.text += stream.finish()
    if stream.stopped:
        count = max(0, stream.tokens_used - used)
        output.tokens = output.tokens[:count]
        if output.log_probs is not None:
            output.log_probs = output.log_probs[:count]
        output.finish_reason = "stop"
        return True
    if not finished:
        output.finish_reason = ""
    return finished


def check(request: TextRequest) -> None:
    """Refuse parameters that depend on the answer alone.

    Each round is a request of its own, whose prompt has the answer so far.
    """
    other = conflicting_parameter(request.sampling, DRAFT_MODEL)
    if request.sequences > 1:
        other = "num_return_sequences"
    elif request.bad_words:
        other = "bad_words"
    if other:
        raise InferenceError(f"{other} cannot be combined with {DRAFT_MODEL}", Code.UNSUPPORTED)


def _round_request(
    request: TextRequest, prompt: list[int], tokens: list[int], count: int
) -> TextRequest:
    """Return the request for the next `count` tokens after `tokens`."""
    sampling = replace(
        request.sampling,
        max_tokens=count,
        min_tokens=max(0, request.sampling.min_tokens - len(tokens)),
    )
    return replace(
        request, prompt=prompt + tokens, sampling=sampling, stop_words=(), skip_special_tokens=False
    )


def _join_timings(earlier: Timing | None, last: Timing | None) -> Timing | None:
    """Return the times of all rounds as those of one request."""
    if earlier is None or last is None:
        return last
    return replace(
        earlier,
        last_token_ns=last.last_token_ns,
        allocated_blocks=earlier.allocated_blocks + last.allocated_blocks,
        draft_tokens=earlier.draft_tokens + last.draft_tokens,
        accepted_draft_tokens=earlier.accepted_draft_tokens + last.accepted_draft_tokens,
    )


async def _collect(generator: Generates, request: TextRequest) -> TextOutput:
    """Return all outputs of a request as one, without the text."""
    whole = TextOutput()
    async with aclosing(generator.generate(request)) as outputs:
        async for output in outputs:
            whole.merge(output)
    return whole
