"""Traces of single requests: which requests are traced, and the trace files that Triton writes.

A `RequestSampler` picks the requests by rate and count. A trace file is a JSON array of small
objects, each with the id of its trace. With the log frequency N, every N traces become a file of
their own (`FILE.0`, `FILE.1`, ...). Without it, all traces go to FILE, which is valid JSON after
each trace.
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
from slipstream.server.kserve.inference import RequestTrace
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.kserve.triton_json import write_scalar, write_string

logger = logging.getLogger(__name__)

TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"
UNLIMITED = -1
# operations of OpenTelemetry's conventions for generative AI
TEXT_COMPLETION = "text_completion"
CHAT = "chat"
EMBEDDINGS = "embeddings"
Headers = Iterable[tuple[str | bytes, str | bytes]]


class Traces(Protocol):
    """The traces of one set of settings."""

    @property
    def remaining(self) -> int: ...

    def next(self, headers: Headers, operation: str) -> RequestTrace | None:
        """Return the trace of the next request, or None when it is not sampled."""
        ...

    def flush(self) -> None: ...


class Finishing:
    """`with Finishing(trace, ...):` around the work on a request. Records an exception, too.

    `last`: the timestamps to record at the end.
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


class RequestSampler:
    """Picks every `rate`-th request until `count` requests are picked. A rate of 0 picks none."""

    def __init__(self, rate: int, count: int) -> None:
        self.remaining = count
        self._rate = rate
        self._seen = 0

    def sample(self) -> bool:
        """Count a request and return whether it is traced."""
        if self.remaining == 0 or not self._rate:
            return False
        self._seen += 1
        if self._seen % self._rate:
            return False
        if self.remaining > 0:
            self.remaining -= 1
        return True


class TraceFile:
    """The trace files of one name. They outlive the settings that traces were made under."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_index = 0
        self._begun = False

    def add(self, activities: bytes) -> None:
        """Append to the file itself. The first call overwrites what an earlier server left."""
        try:
            with self._path.open("r+b" if self._begun else "wb") as file:
                if self._begun:
                    file.seek(-1, 2)  # overwrite the closing bracket
                file.write((b"," if self._begun else b"[") + activities + b"]")
            self._begun = True
        except OSError as error:
            self._log_error(self._path, error)

    def add_indexed(self, activities: bytes) -> None:
        """Write a numbered file next to the file itself."""
        path = self._path.with_name(f"{self._path.name}.{self._next_index}")
        self._next_index += 1
        try:
            path.write_bytes(b"[" + activities + b"]")
        except OSError as error:
            self._log_error(path, error)

    def _log_error(self, path: Path, error: OSError) -> None:
        logger.error("cannot write the trace file %s: %s", path, error.strerror)


class FileTraces:
    """Traces that go to a file."""

    def __init__(
        self,
        file: TraceFile,
        levels: Iterable[str],
        sampler: RequestSampler,
        log_frequency: int,
        ids: itertools.count[int],
    ) -> None:
        self.levels = frozenset(levels)
        self.ids = ids
        self._file = file
        self._sampler = sampler
        self._log_frequency = log_frequency
        self._open = 0
        self._collected: list[bytes] = []

    @property
    def remaining(self) -> int:
        return self._sampler.remaining

    def next(self, headers: Headers, operation: str) -> FileTrace | None:
        if not self._sampler.sample():
            return None
        self._open += 1
        return FileTrace(next(self.ids), self)

    def finish(self, activities: bytes) -> None:
        self._open -= 1
        if not self._log_frequency and self.remaining == UNLIMITED:
            self._file.add(activities)
            return
        self._collected.append(activities)
        exhausted = self.remaining == 0 and not self._open
        if exhausted or len(self._collected) == self._log_frequency:
            self.flush(indexed=True)

    def flush(self, indexed: bool = False) -> None:
        """Write the collected traces: to a numbered file, or to the file itself when no log
        frequency is set and the count was not reached.
        """
        if not self._collected:
            return
        activities = b",".join(self._collected)
        self._collected = []
        if indexed or self._log_frequency:
            self._file.add_indexed(activities)
        else:
            self._file.add(activities)


@dataclass(slots=True)
class FileTrace:
    """The trace of one request. The traces of requests that it causes are written with it."""

    id: int
    traces: FileTraces
    parent_id: int = 0
    activities: list[bytes] = field(default_factory=list)
    context: str = ""

    def child(self) -> FileTrace:
        return FileTrace(next(self.traces.ids), self.traces, self.id, self.activities)

    def sibling(self) -> None:
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
        """Record nothing: Triton's files have no field for it."""

    def fail(self, kind: str) -> None:
        """Record nothing: Triton's files have no field for it."""

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
    """Format a value as a C++ stream does. Text is in quotes."""
    if isinstance(value, bytes):
        return b'"' + value + b'"'
    return b"%d" % value if isinstance(value, int) else f"{value:g}".encode()
