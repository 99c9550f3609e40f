"""An HTTP connection without a socket and with a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.server.http.connection import ConnectionLimits, ConnectionSet, HttpConnection
from slipstream.server.http.exchange import Handler


@dataclass
class FakeTimer:
    when: float
    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[FakeTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> FakeTimer:
        timer = FakeTimer(when, callback)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Move the time and call the timers that are due."""
        end = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.when <= end]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.callback()
        self.now = end


class FakeTransport(asyncio.Transport):
    """Keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.reading = True

    @property
    def data(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class MemoryClient:
    """A client of a handler, over a connection in memory."""

    def __init__(self, handler: Handler, limits: ConnectionLimits | None = None) -> None:
        self.clock = FakeClock()
        self.transport = FakeTransport()
        self.members = ConnectionSet()
        self.connection = HttpConnection(handler, self.members, limits, self.clock)
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def leave(self) -> None:
        self.transport.closed = True
        self.connection.connection_lost(None)

    async def settle(self) -> bytes:
        """Let the handlers run as far as they can. Return everything that was received."""
        for _ in range(10):
            await asyncio.sleep(0)
        return self.transport.data
