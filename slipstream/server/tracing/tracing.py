"""Traces of single requests: who is traced, what is told of him, and the files that Triton writes
of it.

A `Turn` picks the requests by rate and count. The files are JSON arrays of small objects, each with
the trace's id. With a log frequency every so many traces become a file of their own (`FILE.0`,
`FILE.1`, …); without one they are collected in FILE, which is whole after every trace.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slipstream.server.kserve.errors import error_type
from slipstream.server.kserve.json_writer import write_scalar, write_string
from slipstream.server.kserve.tensors import Tensor

logger = logging.getLogger(__name__)

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
UNLIMITED = -1
TEXT_COMPLETION, CHAT = "text_completion", "chat"
Headers = Iterable[tuple[str | bytes, str | bytes]]


class RequestTrace(Protocol):
    """One request on its way, told of by whoever works on it."""

    @property
    def context(self) -> str:
        """JSON of the headers with which others could join it; empty where they cannot."""
        ...

    def child(self) -> RequestTrace:
        """Of a request that this one is taken apart into."""
        ...

    def beside(self) -> RequestTrace | None:
        """Of another request that the same call makes; None where a trace tells of one only."""
        ...

    def stamp(self, name: str, ns: int = 0) -> None: ...
    def model(self, name: str, version: str, request_id: str) -> None: ...
    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None: ...
    def generated(self, prompt_tokens: int, output_tokens: int, first_token_ns: int) -> None: ...
    def fail(self, kind: str) -> None: ...
    def finish(self) -> None: ...


class Traces(Protocol):
    """The traces that one set of settings asks for."""

    @property
    def left(self) -> int: ...

    def next(self, headers: Headers, operation: str) -> RequestTrace | None:
        """For one more request; None where it is not to be traced."""
        ...

    def flush(self) -> None: ...


class Finishing:
    """`with Finishing(trace, …):` while the request is worked on; what goes wrong is told, too.

    `last`: the stamps that end it.
    """

    __slots__ = ("_last", "_trace")

    def __init__(self, trace: RequestTrace | None, *last: str) -> None:
        self._trace = trace
        self._last = last

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if (trace := self._trace) is None:
            return
        if error is not None:
            trace.fail(error_type(error))
        for name in self._last:
            trace.stamp(name)
        trace.finish()


class Turn:
    """Every `rate`-th request, `left` of them; with a rate of 0 nobody."""

    def __init__(self, rate: int, count: int) -> None:
        self.left = count
        self._rate = rate
        self._seen = 0

    def comes(self) -> bool:
        if self.left == 0 or not self._rate:
            return False
        self._seen += 1
        if self._seen % self._rate:
            return False
        if self.left > 0:
            self.left -= 1
        return True


class TraceFile:
    """Where the traces of one file name go, whatever settings they were made under."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_index = 0
        self._begun = False

    def add(self, activities: bytes) -> None:
        """At the end of the file itself, which begins anew with the first."""
        try:
            with self._path.open("r+b" if self._begun else "wb") as file:
                if self._begun:
                    file.seek(-1, 2)  # over the bracket
                file.write((b"," if self._begun else b"[") + activities + b"]")
            self._begun = True
        except OSError as error:
            self._complain(self._path, error)

    def add_indexed(self, activities: bytes) -> None:
        """As a file of its own, beside it."""
        path = self._path.with_name(f"{self._path.name}.{self._next_index}")
        self._next_index += 1
        try:
            path.write_bytes(b"[" + activities + b"]")
        except OSError as error:
            self._complain(path, error)

    def _complain(self, path: Path, error: OSError) -> None:
        logger.error("cannot write the trace file %s: %s", path, error.strerror)


class FileTraces:
    """Those that go to a file."""

    def __init__(
        self,
        file: TraceFile,
        levels: Iterable[str],
        turn: Turn,
        log_frequency: int,
        ids: itertools.count[int],
    ) -> None:
        self.levels = frozenset(levels)
        self.ids = ids
        self._file = file
        self._turn = turn
        self._log_frequency = log_frequency
        self._open = 0
        self._collected: list[bytes] = []

    @property
    def left(self) -> int:
        return self._turn.left

    def next(self, headers: Headers, operation: str) -> FileTrace | None:
        if not self._turn.comes():
            return None
        self._open += 1
        return FileTrace(next(self.ids), self)

    def finish(self, activities: bytes) -> None:
        self._open -= 1
        if not self._log_frequency and self.left == UNLIMITED:
            self._file.add(activities)
            return
        self._collected.append(activities)
        exhausted = self.left == 0 and not self._open
        if exhausted or len(self._collected) == self._log_frequency:
            self.flush(indexed=True)

    def flush(self, indexed: bool = False) -> None:
        """Write what is collected. Without a frequency, a count that was never reached ends in the
        file itself.
        """
        if self._collected:
            collected, self._collected = b",".join(self._collected), []
            (self._file.add_indexed if indexed or self._log_frequency else self._file.add)(
                collected
            )


@dataclass(slots=True)
class FileTrace:
    """One request. Those it is taken apart into are its children, and are written with it."""

    id: int
    traces: FileTraces
    parent_id: int = 0
    activities: list[bytes] = field(default_factory=list)
    context: str = ""

    def child(self) -> FileTrace:
        return FileTrace(next(self.traces.ids), self.traces, self.id, self.activities)

    def beside(self) -> None:
        return None

    def stamp(self, name: str, ns: int = 0) -> None:
        if TIMESTAMPS in self.traces.levels:
            text = b'{"id":%d,"timestamps":[{"name":"%s","ns":%d}]}'
            self.activities.append(text % (self.id, name.encode(), ns or time.monotonic_ns()))

    def model(self, name: str, version: str, request_id: str) -> None:
        text = b'{"id":%d,"model_name":%s,"model_version":%d' % (
            self.id,
            write_scalar(name),
            int(version),
        )
        if request_id:
            text += b',"request_id":' + write_scalar(request_id)
        if self.parent_id:
            text += b',"parent_id":%d' % self.parent_id
        self.activities.append(text + b"}")

    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if TENSORS in self.traces.levels:
            for tensor in tensors:
                self.activities.append(_tensor_activity(self.id, activity.encode(), tensor))

    def generated(self, prompt_tokens: int, output_tokens: int, first_token_ns: int) -> None:
        """These files have no place for it."""

    def fail(self, kind: str) -> None:
        """Nor for this."""

    def finish(self) -> None:
        self.traces.finish(b",".join(self.activities))


def _tensor_activity(trace_id: int, activity: bytes, tensor: Tensor) -> bytes:
    data = b",".join([_element(value) for value in tensor.values()])
    shape = ",".join(str(dim) for dim in tensor.shape)
    return b'{"id":%d,"activity":"%s","tensor":{"name":%s,"data":%s,"shape":"%s","dtype":"%s"}}' % (
        trace_id,
        activity,
        write_scalar(tensor.name),
        write_string(data),
        shape.encode(),
        tensor.datatype.encode(),
    )


def _element(value: object) -> bytes:
    """As a C++ stream prints it; text stands in quotes."""
    if isinstance(value, bytes):
        return b'"' + value + b'"'
    return b"%d" % value if isinstance(value, int) else f"{value:g}".encode()
