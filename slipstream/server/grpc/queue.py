"""What gRPC's C library has done, brought to the event loop.

This is the layer that `grpc.server` is built on too. `grpc.aio` spends some 200 µs on an empty
call, nearly all of it on the futures and callbacks it has around every operation; here an operation
is started with what it ends with.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from grpc._cython import cygrpc

logger = logging.getLogger(__name__)

_NONE_LEFT = cygrpc.CompletionType.queue_timeout
_CLOSED = cygrpc.CompletionType.queue_shutdown
_AT_ONCE = 0  # a deadline that is long past
_EVENTS_A_TURN = 64  # then the event loop's other work goes first


class CompletionQueue:
    """The operations that are complete, each handed to its tag: a callable, or None where nobody
    needs to know.

    While there is work the event loop takes it from the queue itself: a thread that fetched each
    event would fight the loop for the interpreter. Only where there is none the thread waits, and
    wakes the loop.
    """

    def __init__(self) -> None:
        self.core = cygrpc.CompletionQueue()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._empty = threading.Lock()  # held while the loop takes events
        self._empty.acquire()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._wait, name="grpc-events", daemon=True)

    def open(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Nothing may be under way any more."""
        self.core.shutdown()
        await self._closed.wait()
        self._thread.join()

    def _wait(self) -> None:
        assert self._event_loop is not None
        while not self._closed.is_set():
            event = self.core.poll()
            if event.tag is None and event.completion_type != _CLOSED:
                continue
            try:
                self._event_loop.call_soon_threadsafe(self._take, event)
            except RuntimeError:  # the event loop has ended, and with it everybody who would listen
                return
            self._empty.acquire()

    def _take(self, event: Any = None) -> None:
        assert self._event_loop is not None
        taken = 0
        while taken < _EVENTS_A_TURN:
            event = event or self.core.poll(_AT_ONCE)
            if event.completion_type == _NONE_LEFT:
                break
            if event.completion_type == _CLOSED:
                self._closed.set()
                self._empty.release()
                return
            _deliver(event)
            event, taken = None, taken + 1
        if taken:
            self._event_loop.call_soon(self._take)  # what was just begun may be complete soon
        else:
            self._empty.release()


def _deliver(event: Any) -> None:
    if event.tag is None:
        return
    try:
        event.tag(event)
    except Exception:  # one call's trouble is not the queue's
        logger.exception("gRPC call failed:")
