"""Requests that wait for an instance of a Python model, and which of them go together."""

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
from slipstream.server.models.queue_policy import level_of
from slipstream.server.python_models.instance import Instance


@dataclass(eq=False, slots=True)
class Pending:
    """A request on its way through the model, and what came back so far that nobody has read.

    An answer is a response and whether it is the end. None is only the end, or else a mark: the
    process that gave it wants to know when it is reached, and gives no more where too much is
    unread.
    """

    request: InferRequest
    came: float
    level: int = 0  # the lower goes first
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


class _Queue:
    """By level; first come, first served within one. Those in the midst of it may leave, many at
    once.
    """

    def __init__(self) -> None:
        self._levels: list[int] = []  # of those that are here, in order
        self._members: dict[int, OrderedDict[Pending, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pending]:
        for level in self._levels:
            yield from self._members[level]

    def add(self, pending: Pending, first: bool = False) -> None:
        """first: of its level"""
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


class Waiting:
    """The most urgent first; with dynamic batching those that fit together are served together."""

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
        pending = Pending(request, time.monotonic(), level_of(request.priority, 0, 0))
        if self._batching is not None:
            levels, default = self._batching.priority_levels, self._batching.default_priority_level
            pending.level = level_of(request.priority, levels, default)
            limit = self._batching.queue_policy.max_queue_size
            if limit and len(self._queue) >= limit:
                name = request.id or "<id_unknown>"
                raise InferenceError(
                    f"[request id: {name}] Exceeds maximum queue size", Code.UNAVAILABLE
                )
            pending.rows, pending.shapes = self._rows(request), self._shapes(request)
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
        """What nobody began to work on is first in the queue again."""
        for pending in reversed(taken):
            pending.instance = None
            self._queue.add(pending, first=True)

    def remove(self, pending: Pending) -> None:
        self._queue.remove(pending)

    def clear(self) -> list[Pending]:
        waiting, self._queue = list(self._queue), _Queue()
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
                self._queue.remove(pending)
                pending.fail(InferenceError("Request timeout expired", Code.UNAVAILABLE))

    def load(self, instance: Instance) -> int:
        """By which instances are asked to take something; here they are asked as they stand."""
        return 0

    def finished(self, pending: Pending) -> bool:
        """Nobody waits for another's end."""
        return False

    def lost(self, instance: Instance, error: InferenceError) -> None:
        """Any other instance does as well."""

    def take(self, instance: Instance) -> list[Pending]:
        """What an idle instance is to execute next; nothing when it is better to wait for more."""
        if self._batching is not None:
            self._expire()
        batch = self._batch()
        if self.delay() > 0 and sum(pending.rows for pending in batch) < self._enough():
            return []
        for pending in batch:
            self._queue.remove(pending)
        return batch

    def _batch(self) -> list[Pending]:
        """Those at the head of the queue that can be executed together."""
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
        """Seconds that those at the head may still wait for company, the one among them that came
        first.
        """
        allowed = (
            self._batching.max_queue_delay_microseconds / 1e6 if self._batching is not None else 0.0
        )
        if not allowed or not self._queue:
            return 0.0
        return max(0.0, min(pending.came for pending in self._batch()) + allowed - time.monotonic())

    def _enough(self) -> int:
        assert self._batching is not None
        return min(
            (size for size in self._batching.preferred_batch_size if size > 0),
            default=self._max_rows,
        )
