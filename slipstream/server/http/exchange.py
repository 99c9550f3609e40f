"""One HTTP request and its answer: uvicorn's, with less to do for each.

A model that does nearly nothing is answered for thousands of times a second, and then a third of
the work is here.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)


class Target(NamedTuple):
    """What a request is for."""

    path: str
    raw_path: bytes
    query: bytes


@lru_cache(maxsize=256)
def read_target(url: bytes) -> Target:
    """Clients ask for the same few again and again."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return Target(unquote(path) if "%" in path else path, parsed.path, parsed.query or b"")


@lru_cache(maxsize=256)
def _written(name: bytes, value: bytes) -> bytes:
    if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
        raise RuntimeError(f"{name!r} with {value!r} is no header")
    return name.lower() + b": " + value + b"\r\n"


class Connection(Protocol):
    """What an exchange needs of the protocol it is a part of."""

    scope: Any
    transport: Any
    flow: FlowControl
    logger: Any
    expect_100_continue: bool

    def on_response_complete(self) -> None: ...


class Exchange(RequestResponseCycle):
    transport: Any  # a `JoiningTransport`
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    expected_content_length = 0

    def __init__(self, connection: Connection, keep_alive: bool) -> None:
        # In place of uvicorn's constructor, most of whose fields are the constants above for most
        # requests.
        self.scope, self.transport, self.flow = (
            connection.scope,
            connection.transport,
            connection.flow,
        )
        self.logger, self.on_response = connection.logger, connection.on_response_complete
        self._arrived = False
        self._reader: asyncio.Future[None] | None = None
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = connection.expect_100_continue
        self.body = bytearray()
        self.chunked_encoding = None
        self._unsent: list[bytes] = []  # the head, until there is something to send with it

    @property
    def message_event(self) -> Any:  # type: ignore[override]
        """For uvicorn's protocol, which sets an event when the connection is lost."""
        return self

    def set(self) -> None:
        """More of the body is here, or its end, or that of the exchange."""
        self._arrived = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def run_asgi(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                raise RuntimeError("the application returned before the end of its answer")
        except asyncio.CancelledError:
            # the server stops and has waited long enough: nothing went wrong here
            self.transport.close()
        except Exception as error:
            self.logger.error("Exception in ASGI application", exc_info=error)
            if self.response_started:
                self.transport.close()
            else:
                await self.send_500_response()
        finally:
            self.on_response = lambda: None

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._arrived:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            self._arrived = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if message["type"] != expected or self.response_complete:
            raise RuntimeError(
                f"'{message['type']}' where '{expected}' is due, or after the end of the answer"
            )
        if self.response_started:
            self._go_on(message.get("body", b""), message.get("more_body", False))
        else:
            self._start(message["status"], message.get("headers", ()))

    def _start(self, status: int, headers: Any) -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        content, says_close = [STATUS_LINE[status]], False
        for name, value in headers:
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding":
                self.chunked_encoding = value == b"chunked"
            elif name == b"connection" and value.lower() == b"close":
                says_close, self.keep_alive = True, False
            content.append(_written(name, value))
        if not self.keep_alive and not says_close:
            content.append(b"connection: close\r\n")
        if (
            self.chunked_encoding is None
            and self.scope["method"] != "HEAD"
            and status not in (204, 304)
        ):
            self.chunked_encoding = True
            content.append(b"transfer-encoding: chunked\r\n")
        content.append(b"\r\n")
        self._unsent = content

    def _go_on(self, body: bytes, more: bool) -> None:
        content, self._unsent = self._unsent, []
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            if body:
                content += (b"%x\r\n" % len(body), body, b"\r\n")
            if not more:
                content.append(b"0\r\n\r\n")
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the answer is not as long as its head announced")
            content.append(body)
        if more:
            self.transport.write(b"".join(content))
        else:
            if self.expected_content_length:
                raise RuntimeError("the answer is not as long as its head announced")
            self.transport.write_last(b"".join(content))
            self.response_complete = True
            self.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
