"""Requests of sequences that wait for a Python model: each sequence keeps to one instance, and to
its order.
"""

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
from slipstream.server.python_models.waiting import Pending

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
    # its own, then that of its instance
    queue: OrderedDict[Pending, None] = field(default_factory=OrderedDict)
    instance: Instance | None = None
    open: int = 0  # requests that wait or run
    ended: bool = False  # no more will come


@dataclass(eq=False, slots=True)
class _Held:
    """By one instance."""

    sequences: set[_Sequence] = field(default_factory=set)
    queue: OrderedDict[Pending, None] = field(default_factory=OrderedDict)


class Sequences:
    """In place of `Waiting`. A sequence that no instance has room for waits until another ends, or
    is idle too long.
    """

    def __init__(self, config: ModelConfig, batching: SequenceBatching) -> None:
        self._config = config
        self._model = config.name
        self._one = (1, 1) if config.max_batch_size > 0 else (1,)
        self._batching = batching
        self._by_identity: dict[int | str, _Sequence] = {}  # those that may go on
        self._backlog: OrderedDict[_Sequence, None] = OrderedDict()  # that no instance has
        self._held: dict[Instance, _Held] = {}
        self._idle: OrderedDict[_Sequence, float] = OrderedDict()  # since when
        self._of: dict[Pending, _Sequence] = {}  # those that wait or run
        self._count = 0  # of those that wait

    def __len__(self) -> int:
        return self._count

    def load(self, instance: Instance) -> int:
        """By which instances are asked to take something, the least first."""
        held = self._held.get(instance)
        return len(held.sequences) if held is not None else 0

    def add(self, request: InferRequest) -> Pending:
        check_sequence(request, self._config)  # `generate` names none
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
        self._of[pending] = sequence
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
                text = "must specify the START flag on the first request of the sequence"
                raise InferenceError(
                    f"inference request for sequence {request.sequence_id} to model '{self._model}' {text}"
                )
            sequence = self._by_identity[request.sequence_id] = _Sequence(request.sequence_id)
            self._backlog[sequence] = None
        elif request.sequence_start:
            text = f"sequence {request.sequence_id} starts again before it has ended"
            logger.warning(text, extra={"model": self._model})
        return sequence

    def _controls(self, request: InferRequest) -> dict[str, Tensor]:
        flags = {START: request.sequence_start, END: request.sequence_end, READY: True}
        return {
            control.name: Tensor.from_values(
                control.name,
                control.datatype,
                self._one,
                [
                    self._identity(control, request.sequence_id)
                    if control.kind == IDENTITY
                    else control.false_true[flags[control.kind]]
                ],
            )
            for control in self._batching.controls
        }

    def _identity(self, control: Control, given: int | str) -> Any:
        if isinstance(given, str):
            if control.datatype == "BYTES":
                return given.encode()
        elif control.datatype != "BYTES":
            low, high = _BOUNDS[control.datatype]
            if low <= given < high:
                return given
        raise InferenceError(
            f"sequence_id does not fit the {control.datatype} of '{control.name}', got {given!r:.80}"
        )

    def take(self, instance: Instance) -> list[Pending]:
        """What it is to execute next: the oldest, and what fits to it of other sequences."""
        self._drop_idle()
        held = self._held.setdefault(instance, _Held())
        self._take_up(instance, held)
        batch: list[Pending] = []
        seen: set[_Sequence] = set()
        for pending in held.queue:
            sequence = self._of[pending]
            if sequence not in seen and (not batch or pending.shapes == batch[0].shapes):
                batch.append(pending)
            seen.add(sequence)  # what was passed over is not overtaken by what comes after it
            if len(batch) == self._batching.together:
                break
        for pending in batch:
            del held.queue[pending]
        self._count -= len(batch)
        return batch

    def _take_up(self, instance: Instance, held: _Held) -> None:
        """As many sequences as it has room and work for; none waits longer than what the instance
        has already.
        """
        busy = {self._of[pending] for pending in held.queue} if self._backlog else set()
        while self._backlog and len(held.sequences) < self._batching.sequences:
            sequence = next(iter(self._backlog))
            first, waits = next(iter(sequence.queue)), next(iter(held.queue), None)
            if (
                waits is not None
                and len(busy) >= self._batching.together
                and waits.came < first.came
            ):
                return
            del self._backlog[sequence]
            held.sequences.add(sequence)
            busy.add(sequence)
            held.queue.update(sequence.queue)
            sequence.instance, sequence.queue = instance, held.queue

    def finished(self, pending: Pending) -> bool:
        """It runs no more. True where others may have waited for that."""
        sequence = self._of.pop(pending, None)
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
        """Seconds until the place of an idle sequence is free for one that waits."""
        if not self._backlog or not self._idle:
            return 0.0
        since = next(iter(self._idle.values()))
        return max(0.0, since + self._batching.idle_microseconds / 1e6 - time.monotonic())

    def put_back(self, taken: list[Pending]) -> None:
        """What nobody began to work on; `lost` is to follow."""
        for pending in taken:
            self._of[pending].queue[pending] = None
        self._count += len(taken)

    def lost(self, instance: Instance, error: InferenceError) -> None:
        """Its process is gone, and what it kept of its sequences: they cannot go on."""
        held = self._held.pop(instance, _Held())
        for sequence in held.sequences:
            self._break_off(sequence, error)

    def remove(self, pending: Pending) -> None:
        """It is given up before its turn: its sequence would miss a step, and ends with it."""
        sequence = self._of.get(pending)
        if sequence is not None and pending in sequence.queue:
            text = f"sequence {sequence.identity} was broken off: a request before this one was cancelled"
            self._break_off(sequence, InferenceError(text, Code.CANCELLED))

    def _break_off(self, sequence: _Sequence, error: InferenceError) -> None:
        if self._by_identity.get(sequence.identity) is sequence:
            del self._by_identity[sequence.identity]
        sequence.ended = True
        for pending in [pending for pending in sequence.queue if self._of[pending] is sequence]:
            del sequence.queue[pending], self._of[pending]
            self._count -= 1
            sequence.open -= 1
            pending.fail(error)
        if sequence.open == 0:
            self._release(sequence)

    def clear(self) -> list[Pending]:
        waiting = [pending for pending, sequence in self._of.items() if pending in sequence.queue]
        for part in (self._by_identity, self._backlog, self._held, self._idle, self._of):
            part.clear()
        self._count = 0
        return waiting
