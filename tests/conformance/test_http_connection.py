"""The HTTP connection: joined writes, limits, timeouts, upgrades and disconnects."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fuzzing import damaged
from grpc_support import recorded_registry
from http_memory import MemoryClient
from http_support import Connection, RunningServer, request_bytes, wait_until

from slipstream.server.http.connection import ConnectionLimits
from slipstream.server.http.exchange import TEXT, UNREAD_BODY_BYTES, ClientGone, Exchange
from slipstream.server.http.routes import HttpRoutes
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.services import create_app, create_context

LIMITS = ConnectionLimits()
LIVE = request_bytes("GET", "/v2/health/live", [], b"")


def recorded_app(access: Access | None = None) -> HttpRoutes:
    context = create_context(access=access) if access else None
    return create_app(recorded_registry()[0], ServerState([]), context)


async def echo(exchange: Exchange) -> None:
    """Answer with the path and the body."""
    body = await exchange.read_body(1 << 30)
    await exchange.respond(200, exchange.path.encode() + b" " + body, TEXT)


def bodies(data: bytes) -> list[bytes]:
    """Return the bodies of consecutive responses with a content length."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(data[:size])
        data = data[size:]
    return found


# -- joined writes


async def handle_nothing(exchange: Exchange) -> None:
    await asyncio.Event().wait()


async def test_writes_of_one_loop_iteration_are_joined() -> None:
    client = MemoryClient(handle_nothing)
    for piece in (b"a", b"b", b"c"):
        client.connection.write(piece)
    assert client.transport.writes == []
    await asyncio.sleep(0)
    assert client.transport.writes == [b"abc"]
    client.connection.write(b"d")
    client.connection.close()
    await asyncio.sleep(0)
    assert (client.transport.writes, client.transport.closed) == ([b"abc", b"d"], True)


async def test_large_writes_are_sent_at_once() -> None:
    client = MemoryClient(handle_nothing)
    client.connection.write(b"x" * LIMITS.joined_bytes)
    client.connection.write(b"y")
    assert client.transport.writes == [b"x" * LIMITS.joined_bytes + b"y"]


async def test_end_of_a_response_is_sent_at_once_with_pending_writes() -> None:
    client = MemoryClient(handle_nothing)
    client.connection.write_last(b"whole")
    assert client.transport.writes == [b"whole"]
    client.connection.write(b"first, ")
    client.connection.write_last(b"last")
    await asyncio.sleep(0)
    assert client.transport.writes == [b"whole", b"first, last"]


async def test_writes_to_a_disconnected_client_are_dropped() -> None:
    client = MemoryClient(handle_nothing)
    client.connection.write(b"too late")
    client.transport.closed = True
    await asyncio.sleep(0)
    assert client.transport.writes == []


# -- disconnects


async def test_disconnect_cancels_the_handler_and_is_reported_as_client_gone() -> None:
    ended: list[str] = []

    async def handler(exchange: Exchange) -> None:
        try:
            with exchange.cancel_on_disconnect():
                await asyncio.Event().wait()
        except ClientGone:
            ended.append("gone")
        with exchange.cancel_on_disconnect():  # the client has already disconnected
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                ended.append("cancelled at once")

    client = MemoryClient(handler)
    client.send(LIVE)
    await client.settle()
    client.leave()
    await client.settle()
    assert ended == ["gone", "cancelled at once"]


async def test_disconnect_after_the_watched_work_cancels_nothing() -> None:
    events: list[str] = []
    go_on = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        with exchange.cancel_on_disconnect():
            pass
        await go_on.wait()
        events.append("ended by itself")

    client = MemoryClient(handler)
    client.send(LIVE)
    await client.settle()
    client.leave()
    go_on.set()
    await client.settle()
    assert events == ["ended by itself"]


# A body of 1 MiB pauses reading; a connection that is not read does not report its end.
@pytest.mark.parametrize("padding", [0, 1 << 20], ids=["small", "large"])
def test_disconnect_is_noticed_for_requests_of_any_size(padding: int) -> None:
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


# -- limits

CHUNKED = (
    b"POST /v2/models/echo/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b'14\r\n{"text_input": "hi"}\r\n0\r\n'
)


def test_trailers_are_not_headers_and_are_bounded() -> None:
    with RunningServer(recorded_app()) as server:
        with Connection(server.port) as connection:
            connection.send(CHUNKED + b"content-encoding: gzip\r\n\r\n")
            answer = connection.answer()
            assert answer is not None
            assert answer.status == 200, "a trailer must not be used as a header"
        with Connection(server.port) as connection:
            connection.send(CHUNKED)
            trailers = b"".join(
                b"trailer-%d: %s\r\n" % (number, b"x" * 100) for number in range(100_000)
            )
            with pytest.raises(ConnectionError):
                connection.send(trailers)


@pytest.mark.parametrize(
    ("limits", "request_head", "accepted"),
    [
        (replace(LIMITS, url_bytes=10), b"GET /123456789 HTTP/1.1\r\nhost: x\r\n\r\n", True),
        (replace(LIMITS, url_bytes=10), b"GET /1234567890 HTTP/1.1\r\nhost: x\r\n\r\n", False),
        (
            replace(LIMITS, head_bytes=40),
            b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 34 + b"\r\n\r\n",
            True,
        ),
        (
            replace(LIMITS, head_bytes=40),
            b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 35 + b"\r\n\r\n",
            False,
        ),
        (replace(LIMITS, head_bytes=40), b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 35, False),
    ],
)
async def test_head_beyond_a_limit_closes_the_connection_without_an_answer(
    limits: ConnectionLimits, request_head: bytes, accepted: bool
) -> None:
    client = MemoryClient(echo, limits)
    client.send(request_head)
    assert bool(await client.settle()) is accepted
    assert client.transport.closed is not accepted


REQUESTS = (
    b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n"
    b"POST /2 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    b"\r\n\r\n"
    b"POST /3 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nt: 1\r\n\r\n"
    b"POST /4 HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\ncontent-length: 5\r\n\r\nGET /"
    b"GET /5?a=b HTTP/1.1\r\nhost: x\r\n\r\n"
)


async def test_answers_do_not_depend_on_the_packets() -> None:
    chance = random.Random(5)
    for _ in range(300):
        client = MemoryClient(echo)
        ends = sorted(chance.sample(range(1, len(REQUESTS)), chance.randint(0, 12)))
        for begin, end in pairwise([0, *ends, len(REQUESTS)]):
            client.send(REQUESTS[begin:end])
            if chance.random() < 0.3:
                await client.settle()
        while client.members.tasks:
            await client.settle()
        assert bodies(client.transport.data) == [
            b"/1 ",
            b"/2 hello",
            b"/3 abcde",
            b"/4 GET /",
            b"/5 ",
        ]
        assert not client.transport.closed


async def test_damaged_requests_are_answered_or_closed() -> None:
    """No damage raises an error in the connection."""
    chance = random.Random(6)
    answered = 0
    closed = 0
    for _ in range(2000):
        client = MemoryClient(echo)
        client.send(damaged(REQUESTS, chance))
        await client.settle()
        answered += bool(client.transport.data)
        closed += client.transport.closed
        client.leave()
        await client.settle()
        assert not client.members.tasks
    assert answered > 100
    assert closed > 500


@pytest.mark.parametrize("chunks", [3, 4])
async def test_number_of_chunks_is_bounded(chunks: int) -> None:
    client = MemoryClient(echo, replace(LIMITS, chunks=4))  # the last chunk, of size 0, is counted
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    client.send(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
    assert bodies(await client.settle()) == ([b"/ xxx"] if chunks == 3 else [])
    assert client.transport.closed is (chunks == 4)


async def test_body_is_not_read_before_the_handler_reads_it() -> None:
    ask = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await ask.wait()
        await exchange.respond(200, b"%d" % len(await exchange.read_body(1 << 30)))

    client = MemoryClient(handler)
    half = b"x" * (UNREAD_BODY_BYTES + 1)
    client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (2 * len(half)))
    client.send(half)
    await client.settle()
    assert not client.transport.reading
    ask.set()
    await client.settle()
    assert client.transport.reading
    client.send(half)
    assert bodies(await client.settle()) == [b"%d" % (2 * len(half))]


async def test_slow_reader_pauses_the_handler() -> None:
    sent: list[int] = []

    async def handler(exchange: Exchange) -> None:
        exchange.start_chunks(200, TEXT)
        for number in range(3):
            await exchange.send_chunk(b"x")
            sent.append(number)
        await exchange.end_chunks()

    client = MemoryClient(handler)
    client.connection.pause_writing()
    client.send(LIVE)
    await client.settle()
    assert sent == []
    client.connection.resume_writing()
    assert (await client.settle()).endswith(b"0\r\n\r\n")
    assert sent == [0, 1, 2]


async def test_disconnect_of_a_slow_reader_ends_the_wait() -> None:
    ended: list[str] = []

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, b"x")
        ended.append("yes")

    client = MemoryClient(handler)
    client.connection.pause_writing()
    client.send(LIVE)
    await client.settle()
    client.leave()
    await client.settle()
    assert ended == ["yes"]


# -- several requests on one connection


async def test_reading_is_paused_while_pipelined_requests_wait() -> None:
    turns: list[asyncio.Event] = []

    async def handler(exchange: Exchange) -> None:
        turns.append(asyncio.Event())
        await turns[-1].wait()
        await exchange.respond(200, b"")

    client = MemoryClient(handler)
    client.send(LIVE * 3)
    await client.settle()
    reading = []
    for turn in range(3):
        assert len(turns) == turn + 1
        reading.append(client.transport.reading)
        turns[turn].set()
        await client.settle()
    assert reading == [False, False, True]
    assert client.transport.data.count(b"HTTP/1.1 200 OK") == 3


def test_pipelined_requests_are_all_answered() -> None:
    with RunningServer(recorded_app()) as server, Connection(server.port) as client:
        client.send(LIVE * 5000)
        assert [client.answer().status for _ in range(5000)] == [200] * 5000


async def test_requests_after_a_closing_one_are_not_answered() -> None:
    client = MemoryClient(echo)
    client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + LIVE)
    assert bodies(await client.settle()) == [b"/1 "]
    assert client.transport.closed


# -- timeouts

HEAD = b"POST /v2/models/echo/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n"
BODY = b'{"text_input": "hi"}'
TOO_SLOW = b'{"error":"the request did not arrive in time"}'


@pytest.mark.parametrize(
    "begun", [HEAD, HEAD + b"\r\n" + BODY[:5], CHUNKED[:-3]], ids=["head", "body", "chunks"]
)
async def test_connection_of_an_incomplete_request_is_closed(begun: bytes) -> None:
    client = MemoryClient(echo)
    client.send(LIVE)
    await client.settle()
    client.transport.writes.clear()
    client.send(begun)
    client.clock.advance(LIMITS.arrival_seconds - 0.01)
    assert await client.settle() == b""
    client.clock.advance(0.02)
    answer = await client.settle()
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert bodies(answer) == [TOO_SLOW]
    assert client.transport.closed


async def test_a_request_that_arrives_slowly_is_answered() -> None:
    client = MemoryClient(echo, replace(LIMITS, arrival_seconds=1, arrival_bytes_per_second=5))
    client.send(HEAD + b"\r\n")
    for begin in range(0, 20, 4):  # each piece adds 0.8 s
        client.clock.advance(0.75)
        client.send(BODY[begin : begin + 4])
    assert bodies(await client.settle()) == [b"/v2/models/echo/generate " + BODY]


async def test_a_packet_extends_the_timeout_to_its_maximum_only() -> None:
    client = MemoryClient(echo, replace(LIMITS, arrival_bytes_per_second=0.01))
    client.send(HEAD + b"\r\n" + BODY[:15])
    client.send(BODY[15:18])
    client.clock.advance(LIMITS.arrival_seconds + 0.01)
    assert bodies(await client.settle()) == [TOO_SLOW]


async def test_timeout_of_a_request_ends_when_it_has_arrived() -> None:
    client = MemoryClient(echo, replace(LIMITS, idle_seconds=1000))
    for count in (1, 2):
        client.send(LIVE[:10])
        client.clock.advance(1)
        client.send(LIVE[10:])
        assert len(bodies(await client.settle())) == count
        client.clock.advance(3 * LIMITS.arrival_seconds)
        assert not client.transport.closed


async def test_a_response_is_not_cut_off_by_an_incomplete_pipelined_request() -> None:
    answer = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await answer.wait()
        await exchange.respond(200, b"slow")

    client = MemoryClient(handler)
    client.send(LIVE + HEAD)
    client.clock.advance(10 * LIMITS.arrival_seconds)
    assert await client.settle() == b""
    answer.set()
    assert bodies(await client.settle()) == [b"slow"]
    client.clock.advance(LIMITS.arrival_seconds)
    assert bodies(await client.settle()) == [b"slow", TOO_SLOW]


async def test_a_long_answer_is_not_cut_off() -> None:
    client = MemoryClient(handle_nothing)
    client.send(LIVE)
    client.clock.advance(100 * LIMITS.idle_seconds)
    assert not client.transport.closed


async def test_an_idle_connection_is_closed() -> None:
    client = MemoryClient(echo)
    client.clock.advance(LIMITS.idle_seconds - 1)
    client.send(LIVE)
    await client.settle()
    client.clock.advance(LIMITS.idle_seconds - 1)
    assert not client.transport.closed
    client.clock.advance(2)
    assert client.transport.closed


@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "second"])
async def test_empty_lines_do_not_keep_a_connection_open(before: bytes) -> None:
    client = MemoryClient(echo)
    client.send(before)
    await client.settle()
    client.clock.advance(LIMITS.idle_seconds - 1)
    client.send(b"\r\n")
    client.clock.advance(2)
    assert client.transport.closed


def test_idle_connection_is_closed_by_the_real_clock() -> None:
    limits = replace(LIMITS, idle_seconds=0.2)
    with RunningServer(recorded_app(), limits) as server, Connection(server.port) as client:
        assert client.head() is None


async def test_idle_time_begins_when_a_body_arrives_after_its_answer() -> None:
    app = recorded_app(Access(api_key="k"))
    client = MemoryClient(app)
    client.send(HEAD + b"\r\n")
    assert (await client.settle()).startswith(b"HTTP/1.1 401 ")
    client.clock.advance(LIMITS.arrival_seconds - 1)
    client.send(BODY)
    client.clock.advance(LIMITS.idle_seconds - 1)
    assert not client.transport.closed
    client.clock.advance(2)
    assert client.transport.closed


async def test_connection_is_closed_silently_if_the_body_stays_incomplete_after_the_answer() -> (
    None
):
    app = recorded_app(Access(api_key="k"))
    client = MemoryClient(app)
    client.send(HEAD + b"\r\n")
    client.clock.advance(1)
    answer = await client.settle()
    client.clock.advance(LIMITS.arrival_seconds)
    assert client.transport.closed
    assert await client.settle() == answer


# -- upgrades and ambiguous requests

UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "websocket": b"connection: Upgrade\r\nUpgrade: websocket\r\nsec-websocket-version: 13\r\n",
}
SMUGGLED = b"GET /v2/models/stats HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("size", [1, 7, 1000], ids=["bytes", "pieces", "whole"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_upgrade_is_ignored_and_its_body_belongs_to_the_request(
    upgrade: bytes, size: int, chunked: bool
) -> None:
    client = MemoryClient(echo)
    if chunked:
        framing = b"transfer-encoding: chunked"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    else:
        framing = b"content-length: %d" % len(SMUGGLED)
        body = SMUGGLED
    request = b"POST /first HTTP/1.1\r\nhost: x\r\n" + upgrade + framing + b"\r\n\r\n" + body
    data = request + b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n"
    for begin in range(0, len(data), size):
        client.send(data[begin : begin + size])
    assert bodies(await client.settle()) == [b"/first " + SMUGGLED, b"/second "]
    assert not client.transport.closed


async def test_many_upgrades_in_one_packet_are_all_answered() -> None:
    client = MemoryClient(echo)
    client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 3000)
    while client.members.tasks:
        await client.settle()
    assert client.transport.data.count(b"HTTP/1.1 200 OK") == 3000


def test_upgrade_over_a_socket_is_answered_once() -> None:
    """The body is a packet of its own, and must not be parsed as another request."""
    head = b"POST /v2/models/echo/generate HTTP/1.1\r\nhost: x\r\n" + UPGRADES["h2c"]
    with RunningServer(recorded_app()) as server:
        with Connection(server.port) as client:
            client.send(head + b"content-length: %d\r\n\r\n" % len(SMUGGLED))
            assert not client.is_closed(0.1)
            client.send(SMUGGLED)
            answer = client.answer()
            assert answer is not None
            assert (answer.status, b"Invalid value" in answer.body) == (500, True)
            assert not client.is_closed(0.1), "no second answer"
        with Connection(server.port) as client:
            client.send(head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            answer = client.answer()
            assert answer is not None
            assert answer.status == 200


@pytest.mark.parametrize(
    "request_bytes",
    {
        "two lengths": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "same length twice": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx",
        "list of lengths": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 5\r\n\r\nhello",
        "signed length": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello",
        "huge length": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\nhello" % 10**30,
        "length and chunks": (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        "chunks and length": (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"
        ),
        "unknown coding": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "coding after chunked": (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n"
        ),
        "folded header": b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
        "bare line feeds": b"GET / HTTP/1.1\nhost: x\n\n",
        "bare carriage returns": b"GET / HTTP/1.1\rhost: x\r\r",
        "space before colon": b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        "connect": b"CONNECT /v2 HTTP/1.1\r\nhost: x\r\n\r\n",
        "connect to a host": b"CONNECT host:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    }.items(),
    ids=lambda case: case[0],
)
async def test_ambiguous_request_closes_the_connection(request_bytes: tuple[str, bytes]) -> None:
    """There is no answer, as in the recordings of Triton for requests that are not HTTP."""
    client = MemoryClient(echo)
    client.send(request_bytes[1])
    assert await client.settle() == b""
    assert client.transport.closed


@pytest.mark.parametrize("size", [b"f" * 17, b"1" + b"0" * 16, b"-1", b"0x5", b"5 5"])
async def test_invalid_chunk_size_closes_the_connection(size: bytes) -> None:
    client = MemoryClient(echo)
    client.send(
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + size + b"\r\nhello"
    )
    assert await client.settle() == b""
    assert client.transport.closed


def test_ambiguous_request_over_a_socket_gets_no_answer() -> None:
    with RunningServer(recorded_app()) as server, Connection(server.port) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED)
        assert client.head() is None


async def test_chunk_of_the_largest_size_is_not_allocated() -> None:
    client = MemoryClient(echo)
    client.send(
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\nhi"
    )
    assert await client.settle() == b""
    assert not client.transport.closed
    client.clock.advance(LIMITS.arrival_seconds)
    assert bodies(await client.settle()) == [TOO_SLOW]


# -- Expect: 100-continue

EXPECTING = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"


def with_body(limit: int) -> Callable[[Exchange], Awaitable[None]]:
    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, await exchange.read_body(limit), TEXT)

    return handler


async def test_100_continue_is_sent_when_the_body_is_read() -> None:
    client = MemoryClient(with_body(5))
    client.send(EXPECTING)
    assert await client.settle() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"hello")
    assert (await client.settle()).endswith(b"\r\n\r\nhello")


async def test_100_continue_is_not_sent_if_the_body_is_not_read() -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.respond(401, b"", TEXT)

    client = MemoryClient(handler)
    client.send(EXPECTING)
    assert (await client.settle()).startswith(b"HTTP/1.1 401 ")


# -- shutdown


async def test_shut_down_closes_an_idle_connection_at_once() -> None:
    client = MemoryClient(echo)
    client.connection.shut_down()
    assert client.transport.closed


async def test_shut_down_completes_a_response_and_announces_the_close() -> None:
    answer = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await answer.wait()
        await exchange.respond(200, b"done")

    client = MemoryClient(handler)
    client.send(LIVE * 2)
    await client.settle()
    client.connection.shut_down()
    assert not client.transport.closed
    answer.set()
    data = await client.settle()
    assert b"\r\nconnection: close\r\n" in data
    assert bodies(data) == [b"done"], "the second request is not answered"
    assert client.transport.closed
