"""The sockets of a model process: frames in pieces of any size, orders, and events."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.server.python_models.channel import Channel
from slipstream.server.python_models.frames import (
    FROM_WORKER,
    ORDERS,
    Cancel,
    Execute,
    Executed,
    FrameError,
    FrameReader,
    Log,
    RequestFrame,
    Response,
    Stop,
    TensorFrame,
    encode,
)
from slipstream.server.python_models.instance import _Link

MESSAGES = [
    Log("I", "one", "here"),
    Executed([Response(7, None, True)]),
    Log("W", "x" * 300, "there"),
]


def request(number: int) -> RequestFrame:
    return RequestFrame(
        number, "", 0, 0, 0, "{}", (), [TensorFrame("text_input", "BYTES", (1,), [b"text"])]
    )


def frame(message: Any) -> bytes:
    return b"".join(encode(message))


def read(reader: FrameReader, data: bytes, most: int = 1 << 30) -> list[Any]:
    """Return the messages of data that is received in pieces of at most this size."""
    messages = []
    while data:
        room = reader.room()
        count = min(len(room), len(data), most)
        room[:count] = data[:count]
        messages += reader.received(count)
        data = data[count:]
    return messages


@pytest.mark.parametrize("size", [1, 3, 5, 64, 10_000])
def test_frames_are_read_from_pieces_of_any_size(size: int) -> None:
    data = b"".join(frame(message) for message in MESSAGES)
    assert read(FrameReader(FROM_WORKER), data, size) == MESSAGES


def test_invalid_frames_are_refused() -> None:
    lengths = frame(Stop())[:8]
    for data in (b"\xff" * 8, b"\x09\0\0\0\x01\0\0\0\x00", b"\x01" * 8, lengths + b"\x01" * 20):
        with pytest.raises(FrameError):
            read(FrameReader(FROM_WORKER), data)


def test_each_end_refuses_messages_of_its_own_side() -> None:
    with pytest.raises(FrameError):
        read(FrameReader(ORDERS), frame(Executed([])))


class Server:
    """The server's ends of a channel."""

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair()
        self.events, their_events = socket.socketpair()
        self.channel = Channel(theirs, their_events)
        self.channel.listen()

    def cancel(self, number: int) -> None:
        self.events.sendall(frame(Cancel(number)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(Channel, "_current", None)
    ended: list[int] = []
    # a channel's thread ends the process when the server is gone
    monkeypatch.setattr("os._exit", ended.append)
    made = Server()
    yield made
    made.orders.close()
    made.events.close()
    until(lambda: ended == [1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_request_cancelled_before_its_order_is_read_is_not_started(server: Server) -> None:
    server.cancel(2)
    until(lambda: server.channel.is_cancelled(2))
    wanted = server.channel.accept([request(number) for number in (1, 2, 3)])
    assert [frame.number for frame in wanted] == [1, 3]
    assert [server.channel.is_cancelled(number) for number in (1, 2, 3)] == [False, False, False]


def test_a_running_request_sees_its_cancellation(server: Server) -> None:
    server.channel.accept([request(1), request(2)])
    server.cancel(1)
    until(lambda: server.channel.is_cancelled(1))
    assert not server.channel.is_cancelled(2)


def test_cancelling_an_answered_request_has_no_effect(server: Server) -> None:
    server.channel.accept([request(1), request(2)])
    server.channel.forget(1)
    server.cancel(1)
    server.cancel(2)
    until(lambda: server.channel.is_cancelled(2))
    assert not server.channel.is_cancelled(1)


def test_orders_are_read_by_the_calling_thread(server: Server) -> None:
    server.orders.sendall(frame(Execute([request(1)])) + frame(Stop()))
    orders = server.channel.orders()
    assert [next(orders), next(orders)] == [Execute([request(1)]), Stop()]


class Noting:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False


async def test_replies_to_several_messages_are_written_together() -> None:
    transport = Noting()

    def follow(message: Any) -> None:
        link.write(Cancel(message.responses[0].number))

    link = _Link(follow, lambda: None)
    link.connection_made(transport)
    data = b"".join(frame(Executed([Response(number, None, True)])) for number in (1, 2))
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))
    link.write(Cancel(3))
    assert transport.written == [frame(Cancel(1)) + frame(Cancel(2)), frame(Cancel(3))]
