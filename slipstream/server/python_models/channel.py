"""A model process's end of the socket: one thread reads, any thread may write."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from typing import Any, ClassVar

from slipstream.server.python_models.frames import (
    TO_WORKER,
    CallAnswer,
    Cancel,
    Control,
    ControlAnswer,
    Execute,
    FrameError,
    FrameReader,
    FromWorker,
    Start,
    Stop,
    ToWorker,
    encode,
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

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._cancelled: dict[int, bool] = {}  # of the requests that are not answered yet
        self.work: queue.SimpleQueue[Start | Execute | Stop] = queue.SimpleQueue()
        Channel._current = self

    @classmethod
    def current(cls) -> Channel:
        if cls._current is None:
            raise RuntimeError("triton_python_backend_utils works only inside a model's process")
        return cls._current

    def listen(self) -> None:
        threading.Thread(target=self._read, name="server", daemon=True).start()

    def _read(self) -> None:
        reader = FrameReader(TO_WORKER)
        try:
            while data := self._connection.recv(1 << 20):
                for message in reader.feed(data):
                    self._take(message)
        except (OSError, FrameError) as error:
            print(f"the connection to the server is lost: {error}", flush=True)
        os._exit(1)  # the server is gone, and with it every reason to be

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Cancel):
            if message.number in self._cancelled:
                self._cancelled[message.number] = True
        elif isinstance(message, CallAnswer | ControlAnswer):
            ended = not isinstance(message, CallAnswer) or message.final
            call = self._calls.pop(message.call, None) if ended else self._calls.get(message.call)
            if call is not None:
                call.answers.put(message)
        else:
            if isinstance(message, Execute):
                self._cancelled.update((request.number, False) for request in message.requests)
            self.work.put(message)

    def send(self, *messages: FromWorker) -> None:
        """Several go out together, which wakes the server once."""
        frames = b"".join(encode(message) for message in messages)
        with self._writing:
            self._connection.sendall(frames)

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

    def expect(self, number: int) -> None:
        self._cancelled.setdefault(number, False)

    def forget(self, number: int) -> None:
        self._cancelled.pop(number, None)

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)
