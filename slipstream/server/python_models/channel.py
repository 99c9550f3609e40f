"""A model process's ends of its sockets: its main thread reads orders, another reads news, any thread may write."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from slipstream.server.python_models.frames import (
    NEWS,
    ORDERS,
    CallAnswer,
    Cancel,
    Control,
    ControlAnswer,
    FrameError,
    FrameReader,
    FromWorker,
    News,
    Order,
    RequestFrame,
    encode,
)

_READ_BYTES = 1 << 20


class PendingCall:
    """A call of another model whose answers arrive."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def next(self) -> Any:
        return self.answers.get()


class Channel:
    _current: ClassVar[Channel | None] = None

    def __init__(self, orders: socket.socket, news: socket.socket) -> None:
        self._orders = orders
        self._news = news
        self._writing = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._marking = threading.Lock()
        self._newest = 0  # of the requests that were taken up: their numbers grow
        self._cancelled: dict[int, bool] = {}  # of the requests that are not answered yet
        Channel._current = self

    @classmethod
    def current(cls) -> Channel:
        if cls._current is None:
            raise RuntimeError("triton_python_backend_utils works only inside a model's process")
        return cls._current

    def orders(self) -> Iterator[Order]:
        return _messages(self._orders, ORDERS)

    def listen(self) -> None:
        threading.Thread(target=self._hear, name="server", daemon=True).start()

    def _hear(self) -> None:
        for message in _messages(self._news, NEWS):
            self._take(message)

    def _take(self, message: News) -> None:
        if isinstance(message, Cancel):
            with self._marking:  # the order it is about may still be on its way
                if message.number in self._cancelled or message.number > self._newest:
                    self._cancelled[message.number] = True
            return
        ended = not isinstance(message, CallAnswer) or message.final
        call = self._calls.pop(message.call, None) if ended else self._calls.get(message.call)
        if call is not None:
            call.answers.put(message)

    def take_up(self, requests: list[RequestFrame]) -> list[RequestFrame]:
        """Those of them that somebody still waits for; the others need no answer."""
        wanted = []
        with self._marking:
            for request in requests:
                if not self._cancelled.pop(request.number, False):
                    self._cancelled[request.number] = False
                    wanted.append(request)
            self._newest = requests[-1].number
        return wanted

    def send(self, message: FromWorker) -> None:
        frame = encode(message)
        with self._writing:
            self._orders.sendall(frame)

    def begin(self) -> PendingCall:
        call = PendingCall(next(self._numbers))
        self._calls[call.number] = call
        return call

    def control(self, action: str, name: str, **details: Any) -> ControlAnswer:
        """Ask the server itself something, and wait."""
        call = self.begin()
        self.send(Control(call.number, action, name, **details))
        answer: ControlAnswer = call.next()
        return answer

    def forget(self, number: int) -> None:
        with self._marking:
            self._cancelled.pop(number, None)

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)


def _messages(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[Any]:
    """What the server sends. When it is gone, so is every reason to be here."""
    reader = FrameReader(decoder)
    room = memoryview(bytearray(_READ_BYTES))  # kept: to get and give back that much each time is slow
    try:
        while count := connection.recv_into(room):
            yield from reader.feed(room[:count])
    except (OSError, FrameError) as error:
        print(f"the connection to the server is lost: {error}", flush=True)
    os._exit(1)
