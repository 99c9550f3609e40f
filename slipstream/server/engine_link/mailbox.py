"""The outputs of each request on their way back from the engine.

A mailbox merges the outputs that arrive between two reads, so a slow reader never builds up a
queue: `max_tokens` bounds what waits for it. `deliver` is called on the reader's event loop.
`LinkedRequests` are the requests of one front end at one engine process, over their link.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.messages import Beam, Cancel, Scores, StepOutputs, Timing
from slipstream.engine.request import GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.link import ServerEnd


class EngineUnavailable(Exception):
    """The engine accepts no new work: it is loading, restarting, draining or stopped.

    The text says which.
    """


@dataclass(slots=True)
class RequestOutput:
    """The new output of one request since the last read.

    A non-empty `finish_reason` makes it the last output.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None  # one per token; None when not requested
    top_log_probs: list[list[tuple[int, float]]] | None = None  # per token; None: not requested
    finish_reason: str = ""
    cached_tokens: int = 0
    error: str = ""
    scores: Scores | None = None  # logits and prompt log-probabilities, where requested
    timing: Timing | None = None  # with the last output, where requested
    beams: Sequence[Beam] | None = None  # with the last output of a beam search, best first
    lost: bool = False  # the error is the loss of the engine, not a fault of the request
    received_ns: int = 0  # time.monotonic_ns() when the last output arrived; 0: not the last

    def merge(self, newer: RequestOutput) -> None:
        """Append a newer output of the same request."""
        self.tokens += newer.tokens
        if newer.log_probs is not None:
            if self.log_probs is None:
                self.log_probs = []
            self.log_probs += newer.log_probs
        if newer.top_log_probs is not None:
            if self.top_log_probs is None:
                self.top_log_probs = []
            self.top_log_probs += newer.top_log_probs
        if newer.cached_tokens > self.cached_tokens:
            self.cached_tokens = newer.cached_tokens
        if newer.scores is not None:
            if self.scores is None:
                self.scores = newer.scores
            else:
                self.scores.merge(newer.scores)
        if newer.finish_reason:
            self.finish_reason = newer.finish_reason
            self.error = newer.error
            self.lost = newer.lost
            self.timing = newer.timing
            self.received_ns = newer.received_ns
            self.beams = newer.beams

    def take_error(self) -> RequestOutput:
        """Return the end of a failed request without its tokens, which stay in this output."""
        end = RequestOutput(
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            error=self.error,
            timing=self.timing,
            lost=self.lost,
            received_ns=self.received_ns,
        )
        self.finish_reason = ""
        self.error = ""
        self.timing = None
        self.lost = False
        self.received_ns = 0
        return end


class InFlightRequest:
    """An async iterator of `RequestOutput`. It ends after the output with a finish reason."""

    def __init__(self, request: GenerateRequest, cancel: Callable[[int, str], None]) -> None:
        self.request = request
        self.event_loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._unread: RequestOutput | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._finished = False  # the last output has arrived
        self._ended = False  # the last output has been read
        # whether outputs before the last one have tokens only
        self.tokens_only = _reports_tokens_only(request.sampling)
        # called with the tokens of each output as it arrives, and whether it is the last
        self.observer: Callable[[Sequence[int], bool], None] | None = None

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self._finished

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the engine to stop. The last output still comes.

        Its finish reason is this one, unless the request has finished for another reason before.
        """
        if not self._finished:
            self._cancel(self.request_id, reason)

    def deliver(self, output: RequestOutput) -> None:
        if self._finished:
            return
        if output.finish_reason:
            self._finished = True
            output.received_ns = time.monotonic_ns()
        if self.observer is not None:
            self.observer(output.tokens, self._finished)
        if self._unread is None:
            self._unread = output
        else:
            self._unread.merge(output)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def deliver_token(self, token: int, cached_tokens: int) -> None:
        """Do what `deliver` does for a single token, the most frequent output."""
        if self.observer is not None:
            self.observer((token,), False)
        unread = self._unread
        if unread is not None:
            unread.tokens.append(token)
            return
        self._unread = RequestOutput([token], cached_tokens=cached_tokens)
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
        output = self._unread
        # A reader ends at an error. It gets the tokens before the error first.
        self._unread = output.take_error() if output.error and output.tokens else None
        self._ended = bool(output.finish_reason)
        return output


class Mailboxes:
    """The requests in flight, by request id. A request leaves with its last output."""

    def __init__(self, ids: Iterator[int] | None = None) -> None:
        """`ids`: ids of new requests, none of them used before; None: from 1 on."""
        self._requests: dict[int, InFlightRequest] = {}
        # An id is never reused, so a late message of an old request finds no mailbox.
        self._ids = itertools.count(1) if ids is None else ids
        self._emptied: list[asyncio.Future[None]] = []
        # called with the number of requests whenever it changes
        self.on_count: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def open(self, request: GenerateRequest, cancel: Callable[[int, str], None]) -> InFlightRequest:
        """Give the request an id of its own and a mailbox."""
        request_id = next(self._ids)
        in_flight = InFlightRequest(replace(request, request_id=request_id), cancel)
        self._requests[request_id] = in_flight
        if self.on_count is not None:
            self.on_count(len(self._requests))
        return in_flight

    def withdraw(self, in_flight: InFlightRequest) -> None:
        """Close the mailbox of a request that could not be sent."""
        self._close(in_flight.request_id)

    def finish(self, request_id: int, output: RequestOutput) -> None:
        """Deliver the last output of a request that no engine has."""
        self._requests[request_id].deliver(output)
        self._close(request_id)

    def deliver(
        self, outputs: StepOutputs, event_loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Deliver the rows of one step to their requests.

        Where an event loop is given, only to the requests of that loop.
        """
        if event_loop is None and outputs.token_counts.count(1) == len(outputs.token_counts):
            self._deliver_tokens(outputs)
            return
        position = 0
        for row, request_id in enumerate(outputs.request_ids):
            end = position + outputs.token_counts[row]
            in_flight = self._requests.get(request_id)
            if in_flight is not None and event_loop in (None, in_flight.event_loop):
                sampling = in_flight.request.sampling
                in_flight.deliver(_row_output(outputs, row, position, end, sampling))
                if in_flight.finished:
                    self._close(request_id)
            position = end

    def _deliver_tokens(self, outputs: StepOutputs) -> None:
        """Deliver rows of one token each, which nearly all steps have."""
        find = self._requests.get
        columns = (outputs.request_ids, outputs.tokens, outputs.cached_tokens)
        for row, (request_id, token, cached_tokens) in enumerate(zip(*columns, strict=True)):
            in_flight = find(request_id)
            if in_flight is None:
                continue
            if in_flight.tokens_only and not outputs.finish_reasons[row]:
                in_flight.deliver_token(token, cached_tokens)
                continue
            sampling = in_flight.request.sampling
            in_flight.deliver(_row_output(outputs, row, row, row + 1, sampling))
            if in_flight.finished:
                self._close(request_id)

    def event_loops(self) -> set[asyncio.AbstractEventLoop]:
        """Return the event loops that wait for an output."""
        return {in_flight.event_loop for in_flight in list(self._requests.values())}

    def fail_all(self, reason: str, event_loop: asyncio.AbstractEventLoop | None = None) -> None:
        for request_id, in_flight in list(self._requests.items()):
            if event_loop in (None, in_flight.event_loop):
                in_flight.fail(reason)
                self._close(request_id)

    def drop(self, event_loop: asyncio.AbstractEventLoop) -> list[int]:
        """Close the mailboxes of a closed event loop, which has no readers any more.

        Returns their request ids.
        """
        requests = list(self._requests.items())
        dropped = [
            request_id for request_id, in_flight in requests if in_flight.event_loop is event_loop
        ]
        for request_id in dropped:
            self._close(request_id)
        return dropped

    async def wait_empty(self) -> None:
        if self._requests:
            emptied = asyncio.get_running_loop().create_future()
            self._emptied.append(emptied)
            await emptied

    def _close(self, request_id: int) -> None:
        del self._requests[request_id]
        if self.on_count is not None:
            self.on_count(len(self._requests))
        if not self._requests:
            for emptied in self._emptied:
                if not emptied.done():
                    emptied.set_result(None)
            self._emptied.clear()


class LinkedRequests:
    """The requests of one front end at one engine process, and the link they go over."""

    def __init__(self, ids: Iterator[int]) -> None:
        """`ids`: the result of `request_ids`."""
        # why the engine does not serve; None while it serves or loads for the first time
        self.failure: str | None = None
        self.draining = False
        self.processes = 0  # processes that have served
        self._link: ServerEnd | None = None  # None while the engine does not serve
        self._mailboxes = Mailboxes(ids)
        # loads the engine, which was unloaded while idle; None: it was not
        self._wake: Callable[[], None] | None = None
        self._held: dict[int, GenerateRequest] = {}  # requests that wait until it serves, by id

    @property
    def serving(self) -> bool:
        return self._link is not None

    @property
    def asleep(self) -> bool:
        """Return whether the engine was unloaded while idle, and does not serve yet."""
        return self._wake is not None

    @property
    def held(self) -> int:
        """The number of requests that wait for an engine that loads again."""
        return len(self._held)

    @property
    def outstanding(self) -> int:
        return len(self._mailboxes)

    def has(self, request_id: int) -> bool:
        return request_id in self._mailboxes

    def watch_outstanding(self, on_count: Callable[[int], None]) -> None:
        """Call this with the number of requests in flight whenever it changes."""
        self._mailboxes.on_count = on_count

    def serve(self, link: ServerEnd) -> None:
        """Send requests over this link from now on."""
        self._link = link
        self._wake = None
        self.failure = None
        self.processes += 1
        for request in self._held.values():
            link.send(request)
        self._held.clear()

    def sleep(self, wake: Callable[[], None]) -> None:
        """Hold requests until an engine serves again, and call `wake` for each."""
        self._link = None
        self._wake = wake

    def lose(self, reason: str) -> None:
        """Fail the requests in flight and refuse others: the engine process has failed."""
        self._link = None
        self._held.clear()
        self.failure = reason
        self._mailboxes.fail_all(f"the engine process failed: {reason}")

    def end(self) -> None:
        """Fail the requests in flight and refuse others: the server is shutting down."""
        self.draining = True
        self._mailboxes.fail_all("the server is shutting down")

    def submit(self, request: GenerateRequest) -> InFlightRequest:
        if self.draining:
            raise EngineUnavailable("the server is shutting down")
        if self._link is None and self._wake is None:
            raise EngineUnavailable(
                f"the engine is not running: {self.failure or 'it is still loading'}"
            )
        in_flight = self._mailboxes.open(request, self._cancel)
        if self._link is None:
            assert self._wake is not None
            self._held[in_flight.request_id] = in_flight.request
            self._wake()
            return in_flight
        try:
            if not self._link.send(in_flight.request):
                raise EngineUnavailable("the engine is not running: its process has ended")
        except Exception:
            # an open mailbox would count as work that the engine never ends
            self._mailboxes.withdraw(in_flight)
            raise
        return in_flight

    def deliver(self, outputs: StepOutputs) -> None:
        self._mailboxes.deliver(outputs)

    async def wait_drained(self) -> None:
        await self._mailboxes.wait_empty()

    def _cancel(self, request_id: int, reason: str) -> None:
        if self._link is not None:
            self._link.send(Cancel([request_id], reason))
        elif self._held.pop(request_id, None) is not None:
            self._mailboxes.finish(request_id, RequestOutput(finish_reason=reason))


def _reports_tokens_only(sampling: SamplingParams) -> bool:
    """Return whether the engine reports no scores of any kind with the tokens."""
    return not (
        sampling.log_probs
        or sampling.top_log_probs
        or sampling.prompt_log_probs
        or sampling.top_prompt_log_probs
        or sampling.prompt_ranks
        or sampling.context_logits
        or sampling.generation_logits
        or sampling.pooling
    )


def _row_output(
    outputs: StepOutputs, row: int, start: int, end: int, sampling: SamplingParams
) -> RequestOutput:
    """Return row `row` of a step, whose tokens are `start` to `end`."""
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
