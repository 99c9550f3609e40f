"""The framing of responses, and handlers that fail."""

from __future__ import annotations

import asyncio

import pytest
from http_memory import MemoryClient

from slipstream.server.http.connection import read_path
from slipstream.server.http.exchange import JSON, TEXT, Exchange, Handler, Headers

GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


async def run_exchange(handler: Handler, request: bytes = GET) -> MemoryClient:
    client = MemoryClient(handler)
    client.send(request)
    await client.settle()
    return client


def respond(body: bytes, content_type: bytes = TEXT, headers: Headers = ()) -> Handler:
    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, body, content_type, headers)

    return handler


def send_chunks(*pieces: bytes) -> Handler:
    async def handler(exchange: Exchange) -> None:
        exchange.start_chunks(200, TEXT)
        for piece in pieces[:-1]:
            await exchange.send_chunk(piece)
        await exchange.end_chunks(pieces[-1])

    return handler


async def test_whole_response_has_a_content_length() -> None:
    client = await run_exchange(respond(b"hello", JSON, [(b"Retry-After", b"1")]))
    assert client.transport.data == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"content-length: 5\r\n\r\nhello"
    )
    assert not client.transport.closed


async def test_chunks_are_framed_and_terminated() -> None:
    client = await run_exchange(send_chunks(b"x" * 26, b"", b"last"))
    head, _, body = client.transport.data.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked"
    assert body == b"1a\r\n" + b"x" * 26 + b"\r\n4\r\nlast\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_head",
    [b"GET /x HTTP/1.1\r\nconnection: close\r\n\r\n", b"GET /x HTTP/1.0\r\n\r\n"],
    ids=["close", "HTTP/1.0"],
)
async def test_connection_that_ends_is_announced_once_and_closed(request_head: bytes) -> None:
    client = await run_exchange(respond(b"a"), request_head)
    assert client.transport.data.lower().count(b"connection: close\r\n") == 1
    assert client.transport.closed


async def test_handler_can_end_a_connection() -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.keep_alive = False
        await exchange.respond(200, b"")

    client = await run_exchange(handler)
    assert b"\r\nconnection: close\r\n" in client.transport.data
    assert client.transport.closed


@pytest.mark.parametrize(
    ("handler", "framing"),
    [
        (respond(b"hello"), b"content-length: 5"),
        (send_chunks(b"hello", b"world"), b"transfer-encoding: chunked"),
    ],
    ids=["whole", "chunks"],
)
async def test_response_to_head_has_no_body(handler: Handler, framing: bytes) -> None:
    client = await run_exchange(handler, b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert client.transport.data == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n" + framing + b"\r\n\r\n"
    )


@pytest.mark.parametrize("header", [(b"bad name", b"x"), (b"good", b"line\r\nbreak")])
async def test_invalid_header_is_refused(header: tuple[bytes, bytes]) -> None:
    client = await run_exchange(respond(b"", TEXT, [header]))
    assert client.transport.data.startswith(b"HTTP/1.1 500 ")
    assert header[0] not in client.transport.data


async def test_second_response_and_early_chunk_are_refused() -> None:
    errors: list[str] = []

    async def handler(exchange: Exchange) -> None:
        try:
            await exchange.send_chunk(b"early")
        except RuntimeError as error:
            errors.append(str(error))
        await exchange.respond(200, b"once")
        for late in (exchange.respond(200, b"twice"), exchange.end_chunks(b"late")):
            try:
                await late
            except RuntimeError as error:
                errors.append(str(error))

    client = await run_exchange(handler)
    assert client.transport.data.endswith(b"\r\n\r\nonce")
    assert errors == [
        "a chunk was sent before the response's head or after its end",
        "a response was begun after another one to the same request",
        "a chunk was sent before the response's head or after its end",
    ]


async def test_nothing_is_written_to_a_disconnected_client() -> None:
    may_answer = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await may_answer.wait()
        await exchange.respond(200, b"a")

    client = await run_exchange(handler)
    client.leave()
    may_answer.set()
    assert await client.settle() == b""


@pytest.mark.parametrize("raised", [None, ValueError("wrong"), asyncio.CancelledError()])
@pytest.mark.parametrize("started", [False, True])
async def test_incomplete_response_is_not_terminated(
    started: bool, raised: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of the handler is logged. A cancelled handler is not."""

    async def handler(exchange: Exchange) -> None:
        if started:
            exchange.start_chunks(200, TEXT)
            await exchange.send_chunk(b"part")
        if raised is not None:
            raise raised

    client = await run_exchange(handler)
    cancelled = isinstance(raised, asyncio.CancelledError)
    assert client.transport.closed
    if started:
        assert client.transport.data.startswith(b"HTTP/1.1 200")
    else:
        assert client.transport.data.startswith(b"" if cancelled else b"HTTP/1.1 500")
    assert not client.transport.data.endswith(b"0\r\n\r\n")
    logged = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert logged == ([] if cancelled else [type(raised or RuntimeError())])


def test_path_is_extracted_from_the_request_target() -> None:
    assert read_path(b"/v2/a%20b?x=1") == "/v2/a%20b"
    assert read_path(b"http://host:80/v2") == "/v2"


async def test_a_long_body_is_read_in_turns_with_other_work() -> None:
    bodies: list[bytes] = []

    async def keep_body(exchange: Exchange) -> None:
        bodies.append(await exchange.read_body(10 << 20))
        await exchange.respond(200, b"read")

    client = MemoryClient(keep_body)
    body = bytes(range(256)) * (4 << 10)  # 1 MiB
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
    await client.settle()
    for start in range(0, len(body), 256 << 10):
        assert client.transport.reading
        client.send(body[start : start + (256 << 10)])
        assert not client.transport.reading
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while not client.transport.data:
            await asyncio.sleep(0.001)
    assert bodies == [body]
    assert client.transport.data.endswith(b"\r\n\r\nread")


async def test_a_body_can_be_read_twice() -> None:
    bodies: list[bytes] = []

    async def read_twice(exchange: Exchange) -> None:
        bodies.extend([await exchange.read_body(1 << 20), await exchange.read_body(1 << 20)])
        await exchange.respond(200, b"read")

    client = MemoryClient(read_twice)
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    await client.settle()
    client.send(b"ab")
    client.send(b"cd")
    await client.settle()
    assert bodies == [b"abcd"] * 2
    assert client.transport.data.count(b"100 Continue") == 1


async def test_a_long_response_is_written_in_pieces() -> None:
    body = bytes(range(256)) * (4 << 10)
    client = await run_exchange(respond(body, TEXT, [(b"a", b"b")]))
    async with asyncio.timeout(30):
        while not client.transport.data.endswith(body):
            await asyncio.sleep(0)
    head, _, received = client.transport.data.partition(b"\r\n\r\n")
    assert b"content-length: 1048576" in head
    assert received == body
    assert max(map(len, client.transport.writes)) < 300_000
