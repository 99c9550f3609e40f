"""A model process's ends of its sockets: its main thread reads orders, another reads news, any
thread may write.
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

from slipstream.server.python_models.frames import (
    NEWS,
    ORDERS,
    Buffer,
    CallAnswer,
    Cancel,
    Control,
    ControlAnswer,
    ErrorFrame,
    FrameError,
    FrameReader,
    FromWorker,
    News,
    Order,
    Read,
    RequestFrame,
    Response,
    ResponseFrame,
    encode,
    size_of,
)
from slipstream.server.python_models.unread import PATIENCE_SECONDS, Unread

_UNREAD = ErrorFrame(
    f"given up: none of its answers was read for {PATIENCE_SECONDS:.0f} seconds", "CANCELLED"
)


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
        self._room = threading.Condition(self._marking)  # for more answers
        self._newest = 0  # of the requests that were taken up: their numbers grow
        self._cancelled: dict[int, bool] = {}  # of the requests that are not answered yet
        self._unread: dict[int, Unread] = {}  # of those of them that have several answers
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
                    self._room.notify_all()
            return
        if isinstance(message, Read):
            with self._marking:
                if (unread := self._unread.get(message.number)) is not None:
                    unread.read()
                    self._room.notify_all()
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

    def answer(self, message: Response) -> None:
        """Send an answer that others follow, once enough of those before it are read. Nobody's
        answers go nowhere.
        """
        number, frame = message.number, encode(message)
        with self._marking:
            if not self._is_wanted(number):
                return
            if (unread := self._unread.get(number)) is None:
                unread = self._unread[number] = Unread()
            if not unread.full or self._wait_for_room(number, unread):
                if unread.add(size_of(frame)):
                    frame += encode(Response(number, None, False))
            elif self._is_wanted(number):
                self._cancelled[number] = True
                frame = encode(Response(number, ResponseFrame([], _UNREAD), True))
            else:
                return
        self._write(frame)

    def _is_wanted(self, number: int) -> bool:
        return self._cancelled.get(number) is False

    def _wait_for_room(self, number: int, unread: Unread) -> bool:
        """False where the request was given up or answered meanwhile, or nothing is read for too
        long.
        """
        while unread.full:
            before = unread.total

            def changed(before: int = before) -> bool:
                return unread.total < before or not self._is_wanted(number)

            if not self._room.wait_for(changed, PATIENCE_SECONDS) or not self._is_wanted(number):
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
        """Ask the server itself something, and wait."""
        call = self.begin()
        self.send(Control(call.number, action, name, **details))
        answer: ControlAnswer = call.next()
        return answer

    def forget(self, number: int) -> None:
        with self._marking:
            self._cancelled.pop(number, None)
            if self._unread.pop(number, None) is not None:
                self._room.notify_all()  # another thread may want to answer still

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)


def _messages(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[Any]:
    """What the server sends. When it is gone, so is every reason to be here."""
    reader = FrameReader(decoder)
    try:
        while count := connection.recv_into(reader.room()):
            yield from reader.received(count)
    except (OSError, FrameError) as error:
        print(f"the connection to the server is lost: {error}", flush=True)
    os._exit(1)
