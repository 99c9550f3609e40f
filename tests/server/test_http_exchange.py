"""How an answer is framed, message by message."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from slipstream.server.http.exchange import Exchange, read_target


class Written(asyncio.Transport):
    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.data += data

    def write_last(self, data: Any) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True


def exchange(method: str = "GET", keep_alive: bool = True) -> tuple[Exchange, Written, list[str]]:
    transport, told = Written(), []
    connection = SimpleNamespace(
        scope={"method": method},
        transport=transport,
        flow=FlowControl(transport),
        logger=None,
        expect_100_continue=False,
        on_response_complete=lambda: told.append("complete"),
    )
    return Exchange(connection, keep_alive), transport, told


async def answer(made: Exchange, headers: list[tuple[bytes, bytes]], *pieces: bytes) -> None:
    await made.send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, 1):
        await made.send(
            {"type": "http.response.body", "body": piece, "more_body": number < len(pieces)}
        )


async def test_an_answer_with_its_length_goes_out_as_it_is() -> None:
    made, transport, told = exchange()
    await answer(made, [(b"content-type", b"text/plain"), (b"content-length", b"5")], b"he", b"llo")
    assert (
        transport.data
        == b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
    )
    assert (told, transport.closed, made.response_complete) == (["complete"], False, True)


async def test_chunks_and_their_end() -> None:
    made, transport, _ = exchange()
    await answer(made, [(b"transfer-encoding", b"chunked")], b"x" * 26, b"", b"last")
    head, _, body = transport.data.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
    assert body == b"1a\r\n" + b"x" * 26 + b"\r\n4\r\nlast\r\n0\r\n\r\n"


async def test_without_a_length_it_is_chunks() -> None:
    made, transport, _ = exchange()
    await answer(made, [], b"ab")
    assert (
        transport.data
        == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    )


@pytest.mark.parametrize("headers", [[], [(b"connection", b"close")]])
async def test_a_connection_that_ends_says_so_once_and_is_closed(
    headers: list[tuple[bytes, bytes]],
) -> None:
    made, transport, _ = exchange(keep_alive=False)
    await answer(made, [*headers, (b"content-length", b"1")], b"a")
    assert transport.data.lower().count(b"connection: close\r\n") == 1
    assert transport.closed


async def test_the_application_may_end_a_connection() -> None:
    made, transport, _ = exchange()
    await answer(made, [(b"connection", b"close"), (b"content-length", b"0")], b"")
    assert transport.closed


async def test_head_has_a_head_only() -> None:
    made, transport, told = exchange("HEAD")
    await answer(made, [(b"content-length", b"5")], b"hello")
    assert transport.data == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    assert told == ["complete"]


@pytest.mark.parametrize("body", [b"four", b"sixsix"])
async def test_a_length_that_is_not_kept_is_an_error(body: bytes) -> None:
    made, _, told = exchange()
    with pytest.raises(RuntimeError, match="not as long as its head announced"):
        await answer(made, [(b"content-length", b"5")], body)
    assert told == []


@pytest.mark.parametrize("header", [(b"bad name", b"x"), (b"good", b"line\r\nbreak")])
async def test_what_would_break_the_head_is_refused(header: tuple[bytes, bytes]) -> None:
    made, transport, _ = exchange()
    with pytest.raises(RuntimeError, match="is no header"):
        await answer(made, [header], b"")
    assert transport.data == b""


async def test_messages_out_of_order_are_refused() -> None:
    made, _, _ = exchange()
    with pytest.raises(RuntimeError, match=r"where 'http\.response\.start' is due"):
        await made.send({"type": "http.response.body", "body": b""})
    await answer(made, [(b"content-length", b"0")], b"")
    for kind in ("http.response.start", "http.response.body"):
        with pytest.raises(RuntimeError, match="after the end"):
            await made.send({"type": kind, "status": 200, "body": b""})


async def test_nothing_is_written_for_a_client_that_has_left() -> None:
    made, transport, told = exchange()
    made.disconnected = True
    await answer(made, [(b"content-length", b"1")], b"a")
    assert (transport.data, told) == (b"", [])


class Log:
    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def error(self, text: str, exc_info: BaseException) -> None:
        self.errors.append(exc_info)


START = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"part", "more_body": True}


@pytest.mark.parametrize("raised", [None, ValueError("wrong"), asyncio.CancelledError()])
@pytest.mark.parametrize("messages", [(), (START, PART)])
async def test_a_part_is_never_taken_for_the_whole(
    messages: Any, raised: BaseException | None
) -> None:
    """Whatever ends the application early. Only being cancelled is no mistake of its own."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if raised is not None:
            raise raised

    made, transport, _ = exchange()
    made.logger = Log()
    await made.run_asgi(app)
    cancelled = isinstance(raised, asyncio.CancelledError)
    assert transport.closed
    assert transport.data.startswith(
        b"HTTP/1.1 200" if messages else b"" if cancelled else b"HTTP/1.1 500"
    )
    assert not transport.data.endswith(b"0\r\n\r\n")
    assert [type(error) for error in made.logger.errors] == (
        [] if cancelled else [type(raised or RuntimeError())]
    )


def test_a_target_is_taken_apart() -> None:
    assert read_target(b"/v2/a%20b?x=1") == ("/v2/a b", b"/v2/a%20b", b"x=1")
    assert read_target(b"http://host:80/v2") == ("/v2", b"/v2", b"")
