"""Requests that wait for an instance of a Python model, and which of them go together."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice

from slipstream.repository.config import DynamicBatching, ModelConfig
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferRequest, InferResponse
from slipstream.server.python_models.instance import Instance


@dataclass(eq=False, slots=True)
class Pending:
    """A request on its way through the model, and what came back so far that nobody has read.

    An answer is a response and whether it is the end. None is only the end, or else a mark: the process that gave it
    wants to know when it is reached, and gives no more where too much is unread.
    """

    request: InferRequest
    came: float
    rows: int = 1
    shapes: tuple[object, ...] = ()  # what must be equal for two requests to be executed together
    number: int = 0  # by which an instance knows it; its requests have growing numbers
    instance: Instance | None = None  # that works on it
    answers: deque[tuple[InferResponse | None, bool]] = field(default_factory=deque)
    _reader: asyncio.Future[None] | None = None  # that waits for the next one

    def put(self, response: InferResponse | None, final: bool) -> None:
        self.answers.append((response, final))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def reach_mark(self) -> None:
        if self.instance is not None:
            self.instance.tell_read(self.number)

    def arrival(self) -> asyncio.Future[None]:
        """Of the next answer, where there is none yet."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def fail(self, error: InferenceError) -> None:
        self.put(InferResponse(error=error, final=True), True)


class Waiting:
    """First come, first served; with dynamic batching those that fit together are served together."""

    def __init__(self, config: ModelConfig) -> None:
        self._batching: DynamicBatching | None = config.dynamic_batching
        self._max_rows = max(1, config.max_batch_size)
        self._batched = config.max_batch_size > 0
        self._ragged = frozenset(tensor.name for tensor in config.inputs if tensor.allow_ragged_batch)
        self._queue: OrderedDict[Pending, None] = OrderedDict()  # those in the midst of it may leave, many at once

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: InferRequest) -> Pending:
        pending = Pending(request, time.monotonic())
        if self._batching is not None:
            limit = self._batching.queue_policy.max_queue_size
            if limit and len(self._queue) >= limit:
                name = request.id or "<id_unknown>"
                raise InferenceError(f"[request id: {name}] Exceeds maximum queue size", Code.UNAVAILABLE)
            pending.rows, pending.shapes = self._rows(request), self._shapes(request)
        self._queue[pending] = None
        return pending

    def _rows(self, request: InferRequest) -> int:
        first = next(iter(request.inputs.values()), None)
        return first.shape[0] if self._batched and first is not None and first.shape else 1

    def _shapes(self, request: InferRequest) -> tuple[object, ...]:
        return tuple(
            (tensor.name, () if tensor.name in self._ragged else tensor.shape[1:])
            for _, tensor in sorted(request.inputs.items())
        )

    def put_back(self, taken: list[Pending]) -> None:
        """What nobody began to work on is first in the queue again."""
        for pending in reversed(taken):
            pending.instance = None
            self._queue[pending] = None
            self._queue.move_to_end(pending, last=False)

    def remove(self, pending: Pending) -> None:
        self._queue.pop(pending, None)

    def clear(self) -> list[Pending]:
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    def _expire(self) -> None:
        assert self._batching is not None
        policy = self._batching.queue_policy
        if policy.timeout_action == "DELAY":
            return
        for pending in list(self._queue):
            limit = policy.default_timeout_microseconds
            if policy.allow_timeout_override and pending.request.timeout_microseconds:
                own = pending.request.timeout_microseconds
                limit = min(limit, own) if limit else own
            if limit and (time.monotonic() - pending.came) * 1e6 > limit:
                del self._queue[pending]
                pending.fail(InferenceError("Request timeout expired", Code.UNAVAILABLE))

    def take(self) -> list[Pending]:
        """What an idle instance is to execute next; nothing when it is better to wait for more."""
        if self._batching is None:
            return [self._queue.popitem(last=False)[0]] if self._queue else []
        self._expire()
        if not self._queue:
            return []
        batch = [next(iter(self._queue))]
        rows = batch[0].rows
        for pending in islice(self._queue, 1, None):
            if pending.shapes != batch[0].shapes or rows + pending.rows > self._max_rows:
                break
            batch.append(pending)
            rows += pending.rows
        if self.delay() > 0 and rows < self._enough():
            return []
        for pending in batch:
            del self._queue[pending]
        return batch

    def delay(self) -> float:
        """Seconds that the first one may still wait for company."""
        if self._batching is None or not self._queue:
            return 0.0
        allowed = self._batching.max_queue_delay_microseconds / 1e6
        return max(0.0, next(iter(self._queue)).came + allowed - time.monotonic())

    def _enough(self) -> int:
        assert self._batching is not None
        return min((size for size in self._batching.preferred_batch_size if size > 0), default=self._max_rows)
