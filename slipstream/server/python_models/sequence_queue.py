"""The queue of a Python model with sequence batching: a sequence stays on one instance."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.repository.config import ModelConfig
from slipstream.repository.sequences import END, IDENTITY, READY, START, Control, SequenceBatching
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.input_checks import check_sequence
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.python_models.instance import Instance
from slipstream.server.python_models.request_queue import Pending

logger = logging.getLogger(__name__)

_BOUNDS = {
    "UINT64": (0, 2**64),
    "INT64": (-(2**63), 2**63),
    "UINT32": (0, 2**32),
    "INT32": (-(2**31), 2**31),
}


@dataclass(eq=False, slots=True)
class _Sequence:
    identity: int | str
    # its own queue until it has an instance, then the queue of the instance
    queue: OrderedDict[Pending, None] = field(default_factory=OrderedDict)
    instance: Instance | None = None
    open: int = 0  # number of requests that wait or run
    ended: bool = False  # the request with the END flag has arrived


@dataclass(eq=False, slots=True)
class _Held:
    """The sequences of one instance, and their requests that wait."""

    sequences: set[_Sequence] = field(default_factory=set)
    queue: OrderedDict[Pending, None] = field(default_factory=OrderedDict)


class SequenceQueue:
    """Has the interface of `RequestQueue`.

    A sequence that no instance has room for waits until another one ends or is idle too long.
    """

    def __init__(self, config: ModelConfig, batching: SequenceBatching) -> None:
        self._config = config
        self._model = config.name
        self._one = (1, 1) if config.max_batch_size > 0 else (1,)
        self._batching = batching
        self._by_identity: dict[int | str, _Sequence] = {}  # sequences that have not ended
        self._backlog: OrderedDict[_Sequence, None] = OrderedDict()  # sequences without an instance
        self._held: dict[Instance, _Held] = {}
        self._idle: OrderedDict[_Sequence, float] = OrderedDict()  # start of the idle time
        self._sequences: dict[Pending, _Sequence] = {}  # by request that waits or runs
        self._count = 0  # number of requests that wait

    def __len__(self) -> int:
        return self._count

    def load(self, instance: Instance) -> int:
        """Return the number of sequences of an instance: the least loaded takes work first."""
        held = self._held.get(instance)
        return len(held.sequences) if held is not None else 0

    def add(self, request: InferRequest) -> Pending:
        check_sequence(request, self._config)  # `generate` requests come without the check
        self._check_rows(request)
        self._drop_idle()
        pending = Pending(
            replace(request, inputs={**request.inputs, **self._controls(request)}), time.monotonic()
        )
        pending.shapes = tuple(
            (tensor.name, tensor.shape) for _, tensor in sorted(pending.request.inputs.items())
        )
        sequence = self._sequence(request)
        self._idle.pop(sequence, None)
        self._sequences[pending] = sequence
        sequence.queue[pending] = None
        sequence.open += 1
        self._count += 1
        if request.sequence_end:
            sequence.ended = True
            del self._by_identity[request.sequence_id]
        return pending

    def _check_rows(self, request: InferRequest) -> None:
        if len(self._one) == 2 and any(tensor.shape[0] > 1 for tensor in request.inputs.values()):
            text = "must specify batch-size 1 due to requirements of sequence batcher"
            raise InferenceError(f"inference request to model '{self._model}' {text}")

    def _sequence(self, request: InferRequest) -> _Sequence:
        sequence = self._by_identity.get(request.sequence_id)
        if sequence is None:
            if not request.sequence_start:
                raise InferenceError(
                    f"inference request for sequence {request.sequence_id} to model "
                    f"'{self._model}' must specify the START flag on the first request of the "
                    "sequence"
                )
            sequence = self._by_identity[request.sequence_id] = _Sequence(request.sequence_id)
            self._backlog[sequence] = None
        elif request.sequence_start:
            text = f"sequence {request.sequence_id} starts again before it has ended"
            logger.warning(text, extra={"model": self._model})
        return sequence

    def _controls(self, request: InferRequest) -> dict[str, Tensor]:
        flags = {START: request.sequence_start, END: request.sequence_end, READY: True}
        tensors = {}
        for control in self._batching.controls:
            if control.kind == IDENTITY:
                value = self._identity(control, request.sequence_id)
            else:
                value = control.false_true[flags[control.kind]]
            tensors[control.name] = Tensor.from_values(
                control.name, control.datatype, self._one, [value]
            )
        return tensors

    def _identity(self, control: Control, given: int | str) -> Any:
        if isinstance(given, str):
            if control.datatype == "BYTES":
                return given.encode()
        elif control.datatype != "BYTES":
            low, high = _BOUNDS[control.datatype]
            if low <= given < high:
                return given
        raise InferenceError(
            f"sequence_id does not fit the {control.datatype} of '{control.name}', "
            f"got {given!r:.80}"
        )

    def take(self, instance: Instance) -> list[Pending]:
        """Return the next batch: the oldest request and matching ones of other sequences."""
        self._drop_idle()
        held = self._held.setdefault(instance, _Held())
        self._assign_sequences(instance, held)
        batch: list[Pending] = []
        seen: set[_Sequence] = set()
        for pending in held.queue:
            sequence = self._sequences[pending]
            if sequence not in seen and (not batch or pending.shapes == batch[0].shapes):
                batch.append(pending)
            seen.add(sequence)  # a request that was skipped is not overtaken by later ones
            if len(batch) == self._batching.together:
                break
        for pending in batch:
            del held.queue[pending]
        self._count -= len(batch)
        return batch

    def _assign_sequences(self, instance: Instance, held: _Held) -> None:
        """Give waiting sequences to an instance that has room for them and too little work."""
        busy = {self._sequences[pending] for pending in held.queue} if self._backlog else set()
        while self._backlog and len(held.sequences) < self._batching.sequences:
            sequence = next(iter(self._backlog))
            first = next(iter(sequence.queue))
            oldest = next(iter(held.queue), None)
            enough = oldest is not None and len(busy) >= self._batching.together
            if enough and oldest is not None and oldest.arrived < first.arrived:
                return
            del self._backlog[sequence]
            held.sequences.add(sequence)
            busy.add(sequence)
            held.queue.update(sequence.queue)
            sequence.instance = instance
            sequence.queue = held.queue

    def finished(self, pending: Pending) -> bool:
        """Note the end of a request; return whether others may have waited for it."""
        sequence = self._sequences.pop(pending, None)
        if sequence is None:
            return False
        sequence.open -= 1
        if sequence.open == 0:
            if sequence.ended:
                self._release(sequence)
            else:
                self._idle[sequence] = time.monotonic()
        return bool(self._backlog)

    def _release(self, sequence: _Sequence) -> None:
        if self._by_identity.get(sequence.identity) is sequence:
            del self._by_identity[sequence.identity]
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        if sequence.instance in self._held:
            self._held[sequence.instance].sequences.discard(sequence)

    def _drop_idle(self) -> None:
        limit = time.monotonic() - self._batching.idle_microseconds / 1e6
        while self._idle and next(iter(self._idle.values())) <= limit:
            self._release(next(iter(self._idle)))

    def delay(self) -> float:
        """Return the seconds until an idle sequence makes room for one that waits."""
        if not self._backlog or not self._idle:
            return 0.0
        since = next(iter(self._idle.values()))
        return max(0.0, since + self._batching.idle_microseconds / 1e6 - time.monotonic())

    def put_back(self, taken: list[Pending]) -> None:
        """Return requests that were not started to their queues. A call of `lost` follows."""
        for pending in taken:
            self._sequences[pending].queue[pending] = None
        self._count += len(taken)

    def lost(self, instance: Instance, error: InferenceError) -> None:
        """End the sequences of an instance whose process ended: their state is lost."""
        held = self._held.pop(instance, _Held())
        for sequence in held.sequences:
            self._break_off(sequence, error)

    def remove(self, pending: Pending) -> None:
        """Remove a cancelled request and end its sequence, which would miss a step."""
        sequence = self._sequences.get(pending)
        if sequence is not None and pending in sequence.queue:
            text = (
                f"sequence {sequence.identity} was broken off: "
                "a request before this one was cancelled"
            )
            self._break_off(sequence, InferenceError(text, Code.CANCELLED))

    def _break_off(self, sequence: _Sequence, error: InferenceError) -> None:
        if self._by_identity.get(sequence.identity) is sequence:
            del self._by_identity[sequence.identity]
        sequence.ended = True
        for pending in [
            pending for pending in sequence.queue if self._sequences[pending] is sequence
        ]:
            del sequence.queue[pending]
            del self._sequences[pending]
            self._count -= 1
            sequence.open -= 1
            pending.fail(error)
        if sequence.open == 0:
            self._release(sequence)

    def clear(self) -> list[Pending]:
        waiting = [
            pending for pending, sequence in self._sequences.items() if pending in sequence.queue
        ]
        for part in (self._by_identity, self._backlog, self._held, self._idle, self._sequences):
            part.clear()
        self._count = 0
        return waiting
