"""Traces of single requests, written as Triton writes them: a JSON array of small objects, each with the trace's id.

A `Sampler` picks the requests to trace by rate and count. With a log frequency every so many traces become a file of
their own (`FILE.0`, `FILE.1`, …); without one they are collected in FILE, which is whole after every trace.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.server import logging
from slipstream.server.json_text import write_scalar, write_string
from slipstream.server.tensors import Tensor

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
UNLIMITED = -1


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
        logging.error(f"cannot write the trace file {path}: {error.strerror}")


class Sampler:
    """The traces that one set of settings asks for: every `rate`-th request, `count` of them."""

    def __init__(
        self,
        file: TraceFile,
        levels: Iterable[str],
        rate: int,
        count: int,
        log_frequency: int,
        ids: itertools.count[int],
    ) -> None:
        self.levels = frozenset(levels)
        self.left = count
        self.ids = ids
        self._file = file
        self._rate = rate
        self._log_frequency = log_frequency
        self._seen = 0
        self._open = 0
        self._collected: list[bytes] = []

    def next(self) -> RequestTrace | None:
        """For one more request; None where it is not to be traced."""
        if self.left == 0:
            return None
        self._seen += 1
        if self._seen % self._rate:
            return None
        if self.left > 0:
            self.left -= 1
        self._open += 1
        return RequestTrace(next(self.ids), self)

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
        """Write what is collected. Without a frequency, a count that was never reached ends in the file itself."""
        if self._collected:
            collected, self._collected = b",".join(self._collected), []
            (self._file.add_indexed if indexed or self._log_frequency else self._file.add)(collected)


@dataclass(slots=True)
class RequestTrace:
    """One request on its way. Those it is taken apart into are its children, and are written with it."""

    id: int
    sampler: Sampler
    parent_id: int = 0
    activities: list[bytes] = field(default_factory=list)

    def child(self) -> RequestTrace:
        return RequestTrace(next(self.sampler.ids), self.sampler, self.id, self.activities)

    def stamp(self, name: str, ns: int = 0) -> None:
        if TIMESTAMPS in self.sampler.levels:
            text = b'{"id":%d,"timestamps":[{"name":"%s","ns":%d}]}'
            self.activities.append(text % (self.id, name.encode(), ns or time.monotonic_ns()))

    def model(self, name: str, version: str, request_id: str) -> None:
        text = b'{"id":%d,"model_name":%s,"model_version":%d' % (self.id, write_scalar(name), int(version))
        if request_id:
            text += b',"request_id":' + write_scalar(request_id)
        if self.parent_id:
            text += b',"parent_id":%d' % self.parent_id
        self.activities.append(text + b"}")

    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if TENSORS in self.sampler.levels:
            for tensor in tensors:
                self.activities.append(_tensor_activity(self.id, activity.encode(), tensor))

    def finish(self) -> None:
        self.sampler.finish(b",".join(self.activities))


def _tensor_activity(trace_id: int, activity: bytes, tensor: Tensor) -> bytes:
    data = b",".join([_element(value) for value in tensor.data])
    shape = ",".join(str(dim) for dim in tensor.shape)
    return b'{"id":%d,"activity":"%s","tensor":{"name":%s,"data":%s,"shape":"%s","dtype":"%s"}}' % (
        trace_id, activity, write_scalar(tensor.name), write_string(data), shape.encode(), tensor.datatype.encode(),
    )  # fmt: skip


def _element(value: object) -> bytes:
    """As a C++ stream prints it; text stands in quotes."""
    if isinstance(value, bytes):
        return b'"' + value + b'"'
    return b"%d" % value if isinstance(value, int) else f"{value:g}".encode()
