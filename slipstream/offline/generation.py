"""Runs the requests of `slipstream.LLM`: single ones, batches and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from slipstream.offline.pooling import Vectors
from slipstream.offline.progress import BatchProgress
from slipstream.offline.results import RequestOutput, merge_scores, request_output
from slipstream.server.engine_link.engine import InFlight, TextOutput, TextRequest
from slipstream.server.engine_link.mailbox import InFlightRequest
from slipstream.server.text.pipeline import TextGenerator

Result = TypeVar("Result")


class GenerationFailed(RuntimeError):
    """The engine failed a request. The message is its reason."""


async def complete(generator: TextGenerator, request: TextRequest) -> RequestOutput:
    """Return the completions of one prompt."""
    prompt_ids: list[int] = []

    def note_prompt(in_flight: InFlight) -> None:
        if isinstance(in_flight, InFlightRequest):
            prompt_ids[:] = in_flight.request.prompt

    request = replace(request, submitted=note_prompt)
    async with aclosing(generator.generate(request)) as stream:
        deltas = [_check(delta) async for delta in stream]
    info = generator.client.info
    vocab_size = info.vocab_size if info is not None else 1
    return request_output(request, deltas, prompt_ids, vocab_size)


async def pool(generator: TextGenerator, request: TextRequest) -> Vectors:
    """Return the pooled vector of one prompt: float32 [size]."""
    async with aclosing(generator.generate(request)) as stream:
        deltas = [_check(delta) async for delta in stream]
    return np.frombuffer(merge_scores(deltas).pooled, dtype=np.float32)


async def stream_pieces(
    generator: TextGenerator, make_request: Callable[[], Coroutine[Any, Any, TextRequest]]
) -> AsyncGenerator[str, None]:
    """Yield the pieces of one completion. Closing the generator cancels the request."""
    request = await make_request()
    async with aclosing(generator.generate(request)) as deltas:
        async for delta in deltas:
            _check(delta)
            if delta.text:
                yield delta.text


async def run_all(
    inputs: Sequence[Any],
    run: Callable[[Any], Coroutine[Any, Any, Result]],
    progress: BatchProgress,
) -> list[Result]:
    """Return the results for all inputs, which run at the same time."""

    async def run_one(given: Any) -> Result:
        result = await run(given)
        progress.add(_count_tokens(result))
        return result

    tasks = [asyncio.ensure_future(run_one(given)) for given in inputs]
    try:
        with progress:
            return await asyncio.gather(*tasks)
    finally:
        # One request failed or the caller was interrupted: cancel the others.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_tokens(result: object) -> int:
    if not isinstance(result, RequestOutput):
        return 0
    return sum(len(completion.tokens) for completion in result.outputs)


def _check(delta: TextOutput) -> TextOutput:
    if delta.finish_reason == "error":
        raise GenerationFailed(delta.error or "the engine gave no reason")
    return delta
