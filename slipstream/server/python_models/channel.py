"""A model process's ends of its two sockets.

The main thread reads orders, another thread reads events, and any thread may write.
"""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from slipstream.server.python_models.flow_control import STALL_SECONDS, FlowControl
from slipstream.server.python_models.frames import (
    EVENTS,
    ORDERS,
    Ack,
    Buffer,
    CallAnswer,
    Cancel,
    Control,
    ControlAnswer,
    ErrorFrame,
    Event,
    FrameError,
    FrameReader,
    FromWorker,
    Order,
    RequestFrame,
    Response,
    ResponseFrame,
    encode,
    size_of,
)

_STALLED = ErrorFrame(
    f"given up: none of its answers was read for {STALL_SECONDS:.0f} seconds", "CANCELLED"
)


class PendingCall:
    """A call of another model whose responses arrive."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def next(self) -> Any:
        return self.answers.get()


class Channel:
    _current: ClassVar[Channel | None] = None

    def __init__(self, orders: socket.socket, events: socket.socket) -> None:
        self._orders = orders
        self._events = events
        self._writing = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._state = threading.Lock()  # guards the fields below
        self._changed = threading.Condition(self._state)
        self._newest = 0  # number of the last request that was accepted; numbers grow
        self._cancelled: dict[int, bool] = {}  # requests that are not answered yet
        self._flows: dict[int, FlowControl] = {}  # those with several responses
        Channel._current = self

    @classmethod
    def current(cls) -> Channel:
        if cls._current is None:
            raise RuntimeError("triton_python_backend_utils works only inside a model's process")
        return cls._current

    def orders(self) -> Iterator[Order]:
        return _messages(self._orders, ORDERS)

    def listen(self) -> None:
        """Start the thread that reads events."""
        threading.Thread(target=self._read_events, name="server", daemon=True).start()

    def _read_events(self) -> None:
        for message in _messages(self._events, EVENTS):
            self._receive(message)

    def _receive(self, message: Event) -> None:
        if isinstance(message, Cancel):
            self._cancel(message.number)
        elif isinstance(message, Ack):
            self._acknowledge(message.number)
        else:
            ended = not isinstance(message, CallAnswer) or message.final
            call = self._calls.pop(message.call, None) if ended else self._calls.get(message.call)
            if call is not None:
                call.answers.put(message)

    def _cancel(self, number: int) -> None:
        with self._state:
            # a number above the newest is of a request whose order has not been read yet
            if number in self._cancelled or number > self._newest:
                self._cancelled[number] = True
                self._changed.notify_all()

    def _acknowledge(self, number: int) -> None:
        with self._state:
            flow = self._flows.get(number)
            if flow is not None:
                flow.acknowledged()
                self._changed.notify_all()

    def accept(self, requests: list[RequestFrame]) -> list[RequestFrame]:
        """Return the requests that were not cancelled; the others need no response."""
        accepted = []
        with self._state:
            for request in requests:
                if not self._cancelled.pop(request.number, False):
                    self._cancelled[request.number] = False
                    accepted.append(request)
            self._newest = requests[-1].number
        return accepted

    def answer(self, message: Response) -> None:
        """Send a non-final response; blocks while too many are unread.

        Responses to cancelled requests are dropped. A request whose responses are not read for too
        long is cancelled.
        """
        number = message.number
        frame = encode(message)
        with self._state:
            if not self._is_running(number):
                return
            flow = self._flows.setdefault(number, FlowControl())
            if not flow.full or self._wait_until_read(number, flow):
                if flow.sent(size_of(frame)):
                    frame += encode(Response(number, None, False))
            elif self._is_running(number):
                self._cancelled[number] = True
                frame = encode(Response(number, ResponseFrame([], _STALLED), True))
            else:
                return
        self._write(frame)

    def _is_running(self, number: int) -> bool:
        return self._cancelled.get(number) is False

    def _wait_until_read(self, number: int, flow: FlowControl) -> bool:
        """Wait while the flow is full.

        Returns False where the request was cancelled or answered meanwhile, or nothing is read for
        too long.
        """
        while flow.full:
            before = flow.unread

            def changed(before: int = before) -> bool:
                return flow.unread < before or not self._is_running(number)

            if not self._changed.wait_for(changed, STALL_SECONDS) or not self._is_running(number):
                return False
        return True

    def send(self, message: FromWorker) -> None:
        self._write(encode(message))

    def _write(self, frame: list[Buffer]) -> None:
        with self._writing:
            for piece in frame:
                self._orders.sendall(piece)

    def begin(self) -> PendingCall:
        call = PendingCall(next(self._numbers))
        self._calls[call.number] = call
        return call

    def control(self, action: str, name: str, **details: Any) -> ControlAnswer:
        """Ask the server itself something, and wait for its answer."""
        call = self.begin()
        self.send(Control(call.number, action, name, **details))
        answer: ControlAnswer = call.next()
        return answer

    def forget(self, number: int) -> None:
        """Drop the state of a request that has its final response."""
        with self._state:
            self._cancelled.pop(number, None)
            if self._flows.pop(number, None) is not None:
                self._changed.notify_all()  # another thread may be waiting to send a response

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)


def _messages(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[Any]:
    """Yield what the server sends. Ends the process when the connection is lost."""
    reader = FrameReader(decoder)
    try:
        while count := connection.recv_into(reader.room()):
            yield from reader.received(count)
    except (OSError, FrameError) as error:
        print(f"the connection to the server is lost: {error}", flush=True)
    os._exit(1)
