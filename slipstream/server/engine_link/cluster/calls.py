"""Calls from other threads into a thread that waits for sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from contextlib import suppress


class Calls:
    """Calls that other threads make, to be carried out in one thread.

    That thread waits until `descriptor` can be read, and then calls `run_waiting`.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reading, self.writing = socket.socketpair()
        self._reading.setblocking(False)
        self.writing.setblocking(False)

    @property
    def descriptor(self) -> int:
        return self._reading.fileno()

    def add(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        with suppress(BlockingIOError, OSError):  # full: it wakes anyway; closed: no one waits
            self.writing.send(b"\0")

    def run_waiting(self) -> None:
        with suppress(BlockingIOError):
            while self._reading.recv(4096):
                pass
        while not self._calls.empty():
            self._calls.get()()

    def close(self) -> None:
        self._reading.close()
        self.writing.close()
