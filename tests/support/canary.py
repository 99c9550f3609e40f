"""Watches a server from another process: the gaps of a stream, and how long health takes.

As a script it writes a line for each event: its kind, its time, the seconds before it, and for how
many of them its own thread waited for a core. That is the work of others, and no gap of the server.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

_HEALTH_SECONDS = 0.005  # between two questions


class Gaps(NamedTuple):
    """The longest times without an event."""

    stream: float
    health: float


class _Event(NamedTuple):
    kind: str
    start: float
    end: float
    waited: float = 0.0  # seconds in which the canary's thread waited for a core

    @property
    def gap(self) -> float:
        return max(0.0, self.end - self.start - self.waited)


class Canary:
    def __init__(self, port: int, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(port), model],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._events: list[_Event] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, *numbers = line.split()
            end, seconds, waited = map(float, numbers)
            self._events.append(_Event(kind, end - seconds, end, waited))

    def gaps(self, start: float, end: float) -> Gaps:
        """Return the longest gaps in a time that has passed. Wait for those that go on after it."""
        deadline = time.monotonic() + 60
        while not {"stream", "health"} <= {e.kind for e in self._events if e.end >= end}:
            assert time.monotonic() < deadline, "the stream or health has stopped"
            time.sleep(0.01)
        found = [e for e in list(self._events) if e.end >= start and e.start <= end]
        return Gaps(*(max(e.gap for e in found if e.kind == kind) for kind in Gaps._fields))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._reader.join(20)


class _Clock(NamedTuple):
    """A time, and for how long this thread had waited for a core by then."""

    seconds: float
    waited: float

    @classmethod
    def read(cls) -> _Clock:
        try:
            waited_ns = Path("/proc/thread-self/schedstat").read_text().split()[1]
        except OSError:  # a kernel without these statistics
            waited_ns = "0"
        return cls(time.monotonic(), int(waited_ns) / 1e9)


def _report(kind: str, start: _Clock) -> _Clock:
    now = _Clock.read()
    seconds, waited = now.seconds - start.seconds, now.waited - start.waited
    sys.stdout.write(f"{kind} {now.seconds} {seconds} {waited}\n")
    sys.stdout.flush()
    return now


def _watch_stream(port: int, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1000, "stream": True})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        last = _Clock.read()
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                last = _report("stream", last)


def _watch_health(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        start = _Clock.read()
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        _report("health", start)
        time.sleep(_HEALTH_SECONDS)


if __name__ == "__main__":
    port = int(sys.argv[1])
    threading.Thread(target=_watch_health, args=(port,), daemon=True).start()
    _watch_stream(port, sys.argv[2])
