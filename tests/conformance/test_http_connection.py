"""What lies between a socket and a request: writes that are joined, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from grpc_support import recorded_registry
from http_support import Connection, RunningServer, request_bytes, wait_until

from slipstream.server.http import connection as http_protocol
from slipstream.server.http.connection import (
    MAX_JOINED_BYTES,
    Departure,
    JoiningTransport,
    PipelineFlow,
)
from slipstream.server.http.routes import create_app
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState


class Noting(asyncio.Transport):
    """A transport that remembers what was written to it, and when it was closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.gone = False

    def is_closing(self) -> bool:
        return self.gone

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append(b"closed")


async def test_the_writes_of_one_turn_go_out_as_one() -> None:
    below = Noting()
    transport = JoiningTransport(below, asyncio.get_running_loop())
    for piece in (b"a", b"b", b"c"):
        transport.write(piece)
    assert below.written == []
    await asyncio.sleep(0)
    assert below.written == [b"abc"]
    transport.write(b"d")
    transport.close()
    await asyncio.sleep(0)
    assert below.written == [b"abc", b"d", b"closed"]


async def test_much_at_once_is_not_held_back() -> None:
    below = Noting()
    transport = JoiningTransport(below, asyncio.get_running_loop())
    transport.write(b"x" * MAX_JOINED_BYTES)
    transport.write(b"y")
    assert below.written == [b"x" * MAX_JOINED_BYTES + b"y"]


async def test_the_end_of_an_answer_does_not_wait_and_takes_along_what_does() -> None:
    below = Noting()
    transport = JoiningTransport(below, asyncio.get_running_loop())
    transport.write_last(b"whole")
    assert below.written == [b"whole"]
    transport.write(b"first, ")
    transport.write_last(b"last")
    await asyncio.sleep(0)
    assert below.written == [b"whole", b"first, last"]


async def test_what_was_meant_for_a_client_that_has_left_is_dropped() -> None:
    below = Noting()
    transport = JoiningTransport(below, asyncio.get_running_loop())
    transport.write(b"too late")
    below.gone = True
    await asyncio.sleep(0)
    assert below.written == []


def test_who_listens_is_told_once_and_also_when_it_is_too_late() -> None:
    told: list[str] = []
    reading: list[int] = []
    departure = Departure(lambda: reading.append(1))
    departure.listen(lambda: told.append("early"))
    departure.ignore()
    departure.leave()
    assert (told, reading) == ([], [1])
    departure.listen(lambda: told.append("late"))
    assert (told, reading) == (["late"], [1])


# of a large one, reading had been paused
@pytest.mark.parametrize("padding", [0, 1 << 20], ids=["small", "large"])
def test_a_client_that_leaves_is_noticed_however_large_its_request(padding: int) -> None:
    registry = recorded_registry()[0]
    model: Any = registry.find("slow_nd").model
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["60000"]}
    body = json.dumps({"id": "left", "inputs": [tensor]}).encode() + b" " * padding
    with RunningServer(create_app(registry, ServerState([]))) as server:
        with Connection(server.port) as connection:
            connection.send(request_bytes("POST", "/v2/models/slow_nd/infer", [], body))
            wait_until(lambda: model.counters.pending == 1)
        wait_until(lambda: model.inner.cancelled == ["left"])
    assert model.counters.failures["CANCELED"] == 1


CHUNKED = (
    b"POST /v2/models/echo/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b'14\r\n{"text_input": "hi"}\r\n0\r\n'
)


def test_trailers_are_not_headers_and_do_not_go_on_for_ever() -> None:
    with RunningServer(create_app(recorded_registry()[0], ServerState([]))) as server:
        with Connection(server.port) as connection:
            connection.send(CHUNKED + b"content-encoding: gzip\r\n\r\n")
            assert connection.answer().status == 200, (
                "as a header it would have made the body unreadable"
            )
        with Connection(server.port) as connection:
            connection.send(CHUNKED)
            trailers = b"".join(
                b"trailer-%d: %s\r\n" % (number, b"x" * 100) for number in range(100_000)
            )
            with pytest.raises(ConnectionError):
                connection.send(trailers)


def test_nothing_is_read_while_requests_wait_for_their_turn() -> None:
    told: list[str] = []

    class Reading(Noting):
        def pause_reading(self) -> None:
            told.append("pause")

        def resume_reading(self) -> None:
            told.append("resume")

    waiting = deque(["a request"])
    flow = PipelineFlow(Reading(), waiting)
    flow.pause_reading()
    flow.resume_reading()
    assert told == ["pause"]
    waiting.clear()
    flow.resume_reading()
    assert told == ["pause", "resume"]


def test_requests_that_come_before_their_turn_are_all_answered() -> None:
    one = request_bytes("GET", "/v2/health/live", [], b"")
    app = create_app(recorded_registry()[0], ServerState([]))
    with RunningServer(app) as server, Connection(server.port) as client:
        client.send(one * 5000)
        assert [client.answer().status for _ in range(5000)] == [200] * 5000


HEAD = b"POST /v2/models/echo/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n"
BODY = b'{"text_input": "hi"}'


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 0.2)
    with RunningServer(create_app(recorded_registry()[0], ServerState([]))) as server:
        yield server


@pytest.mark.parametrize(
    "begun", [HEAD, HEAD + b"\r\n" + BODY[:5], CHUNKED[:-3]], ids=["head", "body", "chunks"]
)
def test_a_request_that_does_not_go_on_coming_is_given_up(
    impatient: RunningServer, begun: bytes
) -> None:
    with Connection(impatient.port) as client:
        client.send(request_bytes("GET", "/v2/health/live", [], b""))
        assert client.answer().status == 200
        client.send(begun)
        answer = client.answer()
        assert (answer.status, answer.body) == (
            408,
            b'{"error":"the request did not arrive in time"}',
        )
        assert client.head() is None, "the connection is closed"


def test_a_request_that_comes_slowly_is_waited_for(
    impatient: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(http_protocol, "PATIENT_BYTES_A_SECOND", 5)
    with Connection(impatient.port) as client:
        client.send(HEAD + b"\r\n")
        for begin in range(0, 20, 4):  # longer than patience alone
            time.sleep(0.3)
            client.send(BODY[begin : begin + 4])
        assert client.answer().status == 200


def test_what_came_at_once_buys_no_more_patience(
    impatient: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "PATIENT_BYTES_A_SECOND", 0.01)
    with Connection(impatient.port) as client:
        client.send(HEAD + b"\r\n" + BODY[:15])
        assert client.answer().status == 408


def test_patience_ends_with_the_request(impatient: RunningServer) -> None:
    one = request_bytes("GET", "/v2/health/live", [], b"")
    with Connection(impatient.port) as client:
        for _ in range(2):
            client.send(one[:10])
            time.sleep(0.05)
            client.send(one[10:])
            assert client.answer().status == 200
            time.sleep(0.6)  # three times as long as a request may take to arrive


def test_an_answer_is_not_cut_off_for_the_request_behind_it(impatient: RunningServer) -> None:
    # milliseconds
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["700"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with Connection(impatient.port) as client:
        client.send(request_bytes("POST", "/v2/models/slow_nd/infer", [], body) + HEAD)
        assert client.answer().status == 200
        assert client.answer().status == 408


def test_a_client_that_says_nothing_is_not_waited_for() -> None:
    app = create_app(recorded_registry()[0], ServerState([]))
    with RunningServer(app, timeout_keep_alive=0.2) as server, Connection(server.port) as client:
        assert client.head() is None


def test_line_ends_are_as_good_as_silence() -> None:
    app = create_app(recorded_registry()[0], ServerState([]))
    with RunningServer(app, timeout_keep_alive=0.3) as server:
        with Connection(server.port) as client:
            client.send(b"\r\n")
            assert client.head() is None
        with Connection(server.port) as client:
            client.send(request_bytes("GET", "/v2/health/live", [], b""))
            assert client.answer().status == 200
            client.send(b"\r\n")
            assert client.head() is None


def test_a_body_that_comes_after_its_answer_is_followed_by_silence() -> None:
    app = create_app(
        recorded_registry()[0], ServerState([]), ServerContext(access=Access(api_key="k"))
    )
    with RunningServer(app, timeout_keep_alive=0.3) as server, Connection(server.port) as client:
        client.send(HEAD + b"\r\n")
        assert client.answer().status == 401
        client.send(BODY)
        assert client.head() is None
