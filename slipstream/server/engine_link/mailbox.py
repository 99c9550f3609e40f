"""One request's way back from the engine: a mailbox that merges what arrives between two reads.

A slow reader never makes a queue: the deltas it has not read yet are one delta, which `max_tokens`
bounds. Whoever runs the engine (a child process or a thread) calls `deliver` on the event loop of
the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engine.messages import Beam, Scores, StepOutputs, Timing
from slipstream.engine.request import SamplingParams


class EngineUnavailable(Exception):
    """The engine takes no new work: it is loading, restarting, draining or gone. The text says
    which.
    """


@dataclass(slots=True)
class RequestOutput:
    """What is new since the last read. A non-empty `finish_reason` makes it the last one."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None  # one a token; None when not asked for
    top_log_probs: list[list[tuple[int, float]]] | None = None  # per token; None when not asked for
    finish_reason: str = ""
    cached_tokens: int = 0
    error: str = ""
    scores: Scores | None = None  # what only some requests ask for
    timing: Timing | None = None  # with the last delta, where it was asked for
    beams: list[Beam] | None = None  # with the last delta of a beam search, best first
    lost: bool = False  # the engine is gone, so that the error is nobody's request's fault

    def merge(self, newer: RequestOutput) -> None:
        self.tokens += newer.tokens
        if newer.log_probs is not None:
            self.log_probs = (self.log_probs or []) + newer.log_probs
        if newer.top_log_probs is not None:
            self.top_log_probs = (self.top_log_probs or []) + newer.top_log_probs
        self.finish_reason = newer.finish_reason
        self.cached_tokens = max(self.cached_tokens, newer.cached_tokens)
        self.error, self.lost, self.timing, self.beams = (
            newer.error,
            newer.lost,
            newer.timing,
            newer.beams,
        )
        if self.scores is None:
            self.scores = newer.scores
        elif newer.scores is not None:
            self.scores.merge(newer.scores)


class InFlightRequest:
    """An async iterator of `RequestOutput`. It ends after the delta that carries a finish reason."""

    def __init__(
        self, request_id: int, sampling: SamplingParams, cancel: Callable[[int, str], None]
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.event_loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._unread: RequestOutput | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._finished = False  # the last delta has arrived
        self._ended = False  # the last delta has been read

    @property
    def finished(self) -> bool:
        return self._finished

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the engine to stop. The last delta still comes, with this reason unless another came
        first.
        """
        if not self._finished:
            self._cancel(self.request_id, reason)

    def deliver(self, delta: RequestOutput) -> None:
        if self._finished:
            return
        self._finished = bool(delta.finish_reason)
        if self._unread is None:
            self._unread = delta
        else:
            self._unread.merge(delta)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def fail(self, reason: str) -> None:
        self.deliver(RequestOutput(finish_reason="error", error=reason, lost=True))

    def __aiter__(self) -> InFlightRequest:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._unread is None:
            if self._ended:
                raise StopAsyncIteration
            self._arrival = self.event_loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        delta, self._unread = self._unread, None
        self._ended = bool(delta.finish_reason)
        return delta


class Mailboxes:
    """The requests in flight, by id. A request leaves with its last delta."""

    def __init__(self) -> None:
        self._generations: dict[int, InFlightRequest] = {}
        self._next_id = 0
        self._emptied: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._generations)

    def open(self, sampling: SamplingParams, cancel: Callable[[int, str], None]) -> InFlightRequest:
        self._next_id += 1  # never reused, so a late message of an old request finds nobody
        generation = InFlightRequest(self._next_id, sampling, cancel)
        self._generations[generation.request_id] = generation
        return generation

    def withdraw(self, generation: InFlightRequest) -> None:
        """It could not be sent: nothing will come for it."""
        self._close(generation.request_id)

    def deliver(
        self, outputs: StepOutputs, event_loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Hand the rows of one step to their requests, only to those of `event_loop` where one is
        given.
        """
        position = 0
        for row, request_id in enumerate(outputs.request_ids):
            end = position + outputs.token_counts[row]
            generation = self._generations.get(request_id)
            if generation is not None and event_loop in (None, generation.event_loop):
                generation.deliver(_delta(outputs, row, position, end, generation.sampling))
                if generation.finished:
                    self._close(request_id)
            position = end

    def event_loops(self) -> set[asyncio.AbstractEventLoop]:
        """Those that wait for something."""
        return {generation.event_loop for generation in list(self._generations.values())}

    def fail_all(self, reason: str, event_loop: asyncio.AbstractEventLoop | None = None) -> None:
        for request_id, generation in list(self._generations.items()):
            if event_loop in (None, generation.event_loop):
                generation.fail(reason)
                self._close(request_id)

    def drop(self, event_loop: asyncio.AbstractEventLoop) -> list[int]:
        """Forget the requests of an event loop that is closed: nobody can read them any more."""
        generations = list(self._generations.values())
        lost = [
            generation.request_id
            for generation in generations
            if generation.event_loop is event_loop
        ]
        for request_id in lost:
            self._close(request_id)
        return lost

    async def wait_empty(self) -> None:
        if self._generations:
            emptied = asyncio.get_running_loop().create_future()
            self._emptied.append(emptied)
            await emptied

    def _close(self, request_id: int) -> None:
        del self._generations[request_id]
        if not self._generations:
            for emptied in self._emptied:
                if not emptied.done():
                    emptied.set_result(None)
            self._emptied.clear()


def _delta(
    outputs: StepOutputs, row: int, start: int, end: int, sampling: SamplingParams
) -> RequestOutput:
    request_id = outputs.request_ids[row]
    wants_log_probs = sampling.log_probs and bool(outputs.log_probs)
    return RequestOutput(
        tokens=outputs.tokens[start:end],
        log_probs=outputs.log_probs[start:end] if wants_log_probs else None,
        top_log_probs=outputs.top_log_probs.get(request_id) if sampling.top_log_probs else None,
        finish_reason=outputs.finish_reasons[row],
        cached_tokens=outputs.cached_tokens[row],
        error=outputs.errors.get(request_id, ""),
        scores=outputs.scores.pop(request_id, None) if outputs.scores else None,
        timing=outputs.timings.get(request_id) if outputs.timings else None,
        beams=outputs.beams.get(request_id) if outputs.beams else None,
    )
