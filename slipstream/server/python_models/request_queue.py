"""The queue of a Python model: requests that wait for an instance, and how they are batched."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.repository.config import DynamicBatching, ModelConfig
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.models.generating import priority_level
from slipstream.server.python_models.instance import Instance


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits or runs, and its responses that are not read yet.

    `answers` holds pairs of a response and whether it is final. None in place of a response is only
    the end, or a marker of flow control that the reader acknowledges.
    """

    request: InferRequest
    arrived: float
    level: int = 0  # priority level, the lowest first
    rows: int = 1  # batch size
    shapes: tuple[object, ...] = ()  # equal for requests that can be executed together
    number: int = 0  # identifies the request to its instance; numbers grow
    instance: Instance | None = None  # the instance that runs it
    answers: deque[tuple[InferResponse | None, bool]] = field(default_factory=deque)
    _arrival: asyncio.Future[None] | None = None  # done when the next answer is there

    def put(self, response: InferResponse | None, final: bool) -> None:
        self.answers.append((response, final))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def acknowledge(self) -> None:
        if self.instance is not None:
            self.instance.acknowledge(self.number)

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that is done when the next answer arrives."""
        self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def fail(self, error: InferenceError) -> None:
        self.put(InferResponse(error=error, final=True), True)


class _Queue:
    """Requests by level, in the order of their arrival within one. Any of them can be removed."""

    def __init__(self) -> None:
        self._levels: list[int] = []  # levels of the queued requests, sorted
        self._members: dict[int, OrderedDict[Pending, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pending]:
        for level in self._levels:
            yield from self._members[level]

    def add(self, pending: Pending, first: bool = False) -> None:
        """Add a request as the last of its level, or as the first."""
        if pending.level not in self._members:
            insort(self._levels, pending.level)
            self._members[pending.level] = OrderedDict()
        self._members[pending.level][pending] = None
        self._members[pending.level].move_to_end(pending, last=not first)
        self._count += 1

    def remove(self, pending: Pending) -> None:
        members = self._members.get(pending.level)
        if members is None or pending not in members:
            return
        del members[pending]
        self._count -= 1
        if not members:
            del self._members[pending.level]
            del self._levels[bisect_left(self._levels, pending.level)]


class RequestQueue:
    """The most urgent requests first, batched where the model has dynamic batching."""

    def __init__(self, config: ModelConfig) -> None:
        self._batching: DynamicBatching | None = config.dynamic_batching
        self._max_rows = max(1, config.max_batch_size)
        self._batched = config.max_batch_size > 0
        self._ragged = frozenset(
            tensor.name for tensor in config.inputs if tensor.allow_ragged_batch
        )
        self._queue = _Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: InferRequest) -> Pending:
        pending = Pending(request, time.monotonic(), priority_level(request.priority, 0, 0))
        if self._batching is not None:
            pending.level = priority_level(
                request.priority,
                self._batching.priority_levels,
                self._batching.default_priority_level,
            )
            limit = self._batching.queue_policy.max_queue_size
            if limit and len(self._queue) >= limit:
                name = request.id or "<id_unknown>"
                raise InferenceError(
                    f"[request id: {name}] Exceeds maximum queue size", Code.UNAVAILABLE
                )
            pending.rows = self._rows(request)
            pending.shapes = self._shapes(request)
        self._queue.add(pending)
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
        """Return requests that no instance has started to the front of the queue."""
        for pending in reversed(taken):
            pending.instance = None
            self._queue.add(pending, first=True)

    def remove(self, pending: Pending) -> None:
        self._queue.remove(pending)

    def clear(self) -> list[Pending]:
        waiting = list(self._queue)
        self._queue = _Queue()
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
            if limit and (time.monotonic() - pending.arrived) * 1e6 > limit:
                self._queue.remove(pending)
                pending.fail(InferenceError("Request timeout expired", Code.UNAVAILABLE))

    def load(self, instance: Instance) -> int:
        """Return the sort key of an instance when work is distributed: here all are equal."""
        return 0

    def finished(self, pending: Pending) -> bool:
        """Return whether the end of a request may let others start: here it does not."""
        return False

    def lost(self, instance: Instance, error: InferenceError) -> None:
        """Do nothing where an instance ends: any other can take its requests."""

    def take(self, instance: Instance) -> list[Pending]:
        """Return the next batch for an idle instance; empty while it is to wait for more."""
        if self._batching is not None:
            self._expire()
        batch = self._batch()
        if self.delay() > 0 and sum(pending.rows for pending in batch) < self._enough():
            return []
        for pending in batch:
            self._queue.remove(pending)
        return batch

    def _batch(self) -> list[Pending]:
        """Return the requests at the head of the queue that can be executed together."""
        batch: list[Pending] = []
        rows = 0
        for pending in self._queue:
            rows += pending.rows
            if batch and (
                self._batching is None or pending.shapes != batch[0].shapes or rows > self._max_rows
            ):
                break
            batch.append(pending)
        return batch

    def delay(self) -> float:
        """Return the seconds that the oldest request at the head may still wait for others."""
        if self._batching is None or not self._queue:
            return 0.0
        allowed = self._batching.max_queue_delay_microseconds / 1e6
        if not allowed:
            return 0.0
        oldest = min(pending.arrived for pending in self._batch())
        return max(0.0, oldest + allowed - time.monotonic())

    def _enough(self) -> int:
        """Return the batch size at which waiting ends."""
        assert self._batching is not None
        return min(
            (size for size in self._batching.preferred_batch_size if size > 0),
            default=self._max_rows,
        )
