"""The links of an engine in a thread: a queue within this process, and a server that uses the same
engine.

    link = SharedLink(deliver)             # on any thread
    serve(loop, link)                      # on the engine's thread
    link.put(ConnectServer(info, paths))   # on any thread: connect the front ends of a server

The server's processes reach the engine as they reach an engine process: over sockets whose paths
are in the order that starts one. `engine_worker/shared_engine_proxy.py` runs in place of that
process.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.engine.messages import (
    FRONTEND_SHIFT,
    Cancel,
    EngineInfo,
    EngineStats,
    Shutdown,
    StatsPeriod,
    StepOutputs,
)
from slipstream.engine.request import GenerateRequest
from slipstream.server.engine_link.engine_end import EngineEnd
from slipstream.server.engine_link.link import EngineFailed, FromEngine, ToLoop
from slipstream.server.engine_link.serve import STATS_SECONDS
from slipstream.server.engine_link.split import OutputSplitter

# request ids of this process: those of a front end that no server has
OWN_INDEX = 1 << 14
_REASON_LINGER_MS = 1000  # longest wait until the server has the reason why the engine ends


@dataclass(frozen=True)
class ConnectServer:
    """Connect the front ends of a server."""

    info: EngineInfo
    sockets: list[str]  # paths, one for each front end
    on_end: Callable[[], None]  # called on the engine's thread when the server disconnects


@dataclass(frozen=True)
class DisconnectServer:
    """Cancel the requests of the server, and disconnect from its front ends."""

    sockets: list[str]  # of the server that has ended: a later one may be connected


class SharedLink:
    """The engine's side of its links. Only `put` may be called on other threads."""

    def __init__(self, deliver: Callable[[StepOutputs | EngineStats], None]) -> None:
        """deliver: takes the outputs of this process, and the statistics"""
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[ToLoop | ConnectServer | DisconnectServer] = (
            queue.SimpleQueue()
        )
        self._taken: list[
            ToLoop | ConnectServer | DisconnectServer
        ] = []  # that `wait` took from the inbox
        # readable when the inbox may have a message, for a wait on the sockets
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()  # held to use `_wake` and to close it
        self._server: EngineEnd | None = None
        self._connected: ConnectServer | None = None
        self._live: set[int] = set()  # unfinished requests of the server
        self._splitter = OutputSplitter()

    @property
    def heartbeat_seconds(self) -> float:
        """A thread cannot stop alone, but a server expects messages."""
        return math.inf if self._server is None else self._server.heartbeat_seconds

    def put(self, message: ToLoop | ConnectServer | DisconnectServer) -> None:
        self._inbox.put(message)
        with self._lock:
            if self._open:
                os.eventfd_write(self._wake, 1)

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            self._send_outputs(message)
        elif isinstance(message, EngineStats):
            self._deliver(message)
            if self._server is not None:
                self._server.send(message)

    def wait(self, seconds: float | None) -> bool:
        if self._taken:
            return True
        if self._server is not None:
            return self._server.wait(seconds)
        try:
            self._taken.append(self._inbox.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    def receive_waiting(self) -> list[ToLoop]:
        found: list[ToLoop] = []
        for message in self._take_inbox():
            if isinstance(message, ConnectServer):
                found += self._disconnect_server()
                self._connect_server(message)
            elif isinstance(message, DisconnectServer):
                if self._connected is not None and self._connected.sockets == message.sockets:
                    found += self._disconnect_server()
            else:
                found.append(message)
        if self._server is not None:
            found += self._receive_from_server(self._server)
        return found

    def close(self, reason: str) -> None:
        """Send the server the reason why the engine ends."""
        if self._server is not None:
            self._server.send(EngineFailed(reason))
        self._disconnect_server(linger_ms=_REASON_LINGER_MS)
        for message in self._take_inbox():
            if isinstance(message, ConnectServer):
                message.on_end()
        with self._lock:
            self._open = False
            os.close(self._wake)

    def _take_inbox(self) -> list[ToLoop | ConnectServer | DisconnectServer]:
        messages = self._taken
        self._taken = []
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return messages  # what `wait` took was all
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def _receive_from_server(self, server: EngineEnd) -> list[ToLoop]:
        found: list[ToLoop] = []
        for message in server.receive_waiting():
            if isinstance(message, Shutdown):
                return [*found, *self._disconnect_server()]
            if isinstance(message, GenerateRequest):
                self._live.add(message.request_id)
            found.append(message)
        return found

    def _send_outputs(self, outputs: StepOutputs) -> None:
        if self._server is None:
            self._deliver(outputs)
            return
        for index, part in self._splitter.split(outputs):
            if index == OWN_INDEX:
                self._deliver(part)
                continue
            for request_id, reason in zip(part.request_ids, part.finish_reasons, strict=True):
                if reason:
                    self._live.discard(request_id)
            self._server.send(part)

    def _connect_server(self, message: ConnectServer) -> None:
        self._connected = message
        self._server = EngineEnd(message.sockets)
        self._server.watch(self._wake)
        self._server.send(message.info)

    def _disconnect_server(self, linger_ms: int = 0) -> list[ToLoop]:
        """Disconnect from the server. Return the messages that end its requests."""
        if self._server is None or self._connected is None:
            return []
        self._server.close(linger_ms)
        on_end = self._connected.on_end
        self._server = None
        self._connected = None
        cancelled = sorted(self._live)
        self._live.clear()
        on_end()
        return [Cancel(cancelled), StatsPeriod(STATS_SECONDS)]


def own_first_id() -> int:
    """Return the first request id of this process."""
    return (OWN_INDEX << FRONTEND_SHIFT) + 1
