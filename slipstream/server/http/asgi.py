"""The few things the HTTP routes need of ASGI: bodies within a limit, whole answers, and noticing
who has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any

from slipstream.server.http.connection import DEPARTURE, Departure
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import InferenceError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

MAX_BODY_BYTES = 64 << 20
JSON = b"application/json"
TEXT = b"text/plain"
OCTETS = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"
RETRY_AFTER = (b"retry-after", b"1")


class Refused(Exception):
    """A request that goes no further than its head."""

    def __init__(self, status: int, message: str, content_type: bytes = TEXT) -> None:
        super().__init__(message)
        self.status, self.message, self.content_type = status, message, content_type


class ClientGone(Exception):
    """The client closed its connection before it had sent everything."""


def header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def check_access(access: Access, api: str, scope: Scope) -> None:
    """Whether the request may call this API; otherwise Refused."""
    if not access.guarded and api not in access.http_restrictions:
        return

    def given(name: str) -> str | None:
        value = header(scope, name.encode("latin-1", "replace"))
        return value.decode("latin-1") if value else None

    refusal = access.refuse_http(api, given)
    if refusal is not None:
        raise Refused(refusal.status, refusal.message)
    access.note_tenant(given)


async def read_body(scope: Scope, receive: Receive, most: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. One that is too big is read to its end, unkept, so that the client gets to
    see the answer.
    """
    announced = int(header(scope, b"content-length") or 0)
    if announced > most and header(scope, b"expect"):
        raise too_big(announced, most)  # it waits to be told to send; it need not
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size <= most:
            pieces.append(piece)
        else:
            pieces.clear()
        if size > 4 * most or not message.get("more_body", False):
            break
    if size > most:
        raise too_big(max(size, announced), most)
    return b"".join(pieces)


def too_big(size: int, most: int) -> InferenceError:
    return InferenceError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


async def send_whole(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
) -> None:
    """An answer with its length."""
    fixed = [(b"content-type", content_type), *headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": fixed})
    await send({"type": "http.response.body", "body": body})


async def start_chunked(
    send: Send, status: int, content_type: bytes, headers: Headers = ()
) -> None:
    """An answer in chunks: each `send_chunk` is one of them."""
    fixed = [(b"content-type", content_type), *headers, (b"transfer-encoding", b"chunked")]
    await send({"type": "http.response.start", "status": status, "headers": fixed})


async def send_chunk(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end_chunks(send: Send, last: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": last})


class WhileConnected:
    """Work done within is cancelled as soon as the client is gone: ClientGone. The body must have
    been read.
    """

    __slots__ = ("_departure", "_task")

    def __init__(self, scope: Scope) -> None:
        self._departure: Departure = scope["state"][DEPARTURE]
        self._task = asyncio.current_task()

    def __enter__(self) -> None:
        assert self._task is not None
        self._departure.listen(self._task.cancel)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._departure.ignore()
        if kind is asyncio.CancelledError and self._departure.left:
            assert self._task is not None
            if not self._task.uncancel():  # otherwise somebody else wants it to end, too
                raise ClientGone from None
