"""One HTTP request and its response, as the routes see them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from http import HTTPStatus
from types import TracebackType
from typing import Protocol
from urllib.parse import parse_qsl

from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.origins import ANY, OriginPolicy
from slipstream.server.text.threads import in_thread_if_long

Headers = Sequence[tuple[bytes, bytes]]
Buffer = bytes | memoryview

JSON = b"application/json"
TEXT = b"text/plain"
OCTETS = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"
RETRY_AFTER = (b"retry-after", b"1")

# Bytes of a body that are kept before the handler begins to read it.
UNREAD_BODY_BYTES = 64 << 10
# A body that is too large is read, but not kept, up to this many times the limit.
_DISCARDED_BODY_LIMITS = 4

_PIECE_BYTES = 256 << 10  # bytes of a long response that are written at once
# Joining the pieces of a body costs less than other work on a request of the same size.
_BYTES_PER_SIZE = 128

_READING_METHODS = ("GET", "HEAD", "OPTIONS")
_FORM_TYPES = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOT_IN_HEADER_NAME = re.compile(b'[\x00-\x1f\x7f()<>@,;:\\[\\]={} \t\\\\"]')
_NOT_IN_HEADER_VALUE = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")


class ClientGone(Exception):
    """The client closed its connection before it had received the whole response."""


class Channel(Protocol):
    """The connection of an exchange, as far as the exchange uses it."""

    closed: bool
    write_paused: bool

    def write(self, data: bytes) -> None: ...

    def write_last(self, data: bytes) -> None: ...

    async def wait_writable(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def watch_disconnect(self, callback: Callable[[], object]) -> None: ...

    def unwatch_disconnect(self, callback: Callable[[], object]) -> None: ...

    def response_sent(self, keep_alive: bool) -> None: ...


class ResponseTrace(Protocol):
    """A trace that records when the response begins and ends."""

    def stamp(self, name: str) -> None: ...


class Exchange:
    """One HTTP request and its response.

    A handler reads the body with `read_body` and writes one response: whole with `respond`, or in
    chunks with `start_chunks`, `send_chunk` and `end_chunks`.
    """

    __slots__ = (
        "_body_bytes",
        "_body_complete",
        "_body_limit",
        "_channel",
        "_head",
        "_pieces",
        "_read_before",
        "_reader",
        "_target",
        "complete",
        "headers",
        "keep_alive",
        "method",
        "more_headers",
        "path",
        "raw_headers",
        "started",
        "trace",
    )

    def __init__(
        self,
        channel: Channel,
        method: str,
        path: str,
        headers: Headers,
        raw_headers: Headers,
        keep_alive: bool = True,
        target: bytes = b"",
    ) -> None:
        self._channel = channel
        self._target = target  # path and query
        self.method = method
        self.path = path  # as sent by the client, without the query
        self.headers = headers  # names in lower case
        self.raw_headers = raw_headers  # names as sent by the client
        self.keep_alive = keep_alive
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._body_limit = sys.maxsize
        self._body_complete = False
        self._read_before = False
        self._reader: asyncio.Future[None] | None = None
        self.started = False
        self.complete = False
        self.more_headers: Headers = ()  # of the response, besides those of the route
        self._head = b""  # head of a chunked response, until its first chunk is sent
        self.trace: ResponseTrace | None = None

    def header(self, name: bytes) -> bytes:
        """Return the value of a header by its lower-case name, or nothing."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    def query(self) -> dict[str, str]:
        """Return the parameters behind the path. The last value of a repeated one counts."""
        query = self._target.partition(b"?")[2].partition(b"#")[0].decode("latin-1")
        return dict(parse_qsl(query, keep_blank_values=True))

    @property
    def target(self) -> bytes:
        """The path and query as the client sent them."""
        return self._target

    # -- the request's body

    @property
    def body_bytes(self) -> int:
        """The length of the body: what has arrived, or more where its headers announce more."""
        return max(self._body_bytes, self._announced_bytes())

    def receive_body(self, data: bytes) -> None:
        """Take the next piece of the body from the connection."""
        self._body_bytes += len(data)
        if self._body_bytes <= self._body_limit:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            if self._body_bytes > _DISCARDED_BODY_LIMITS * self._body_limit:
                self.wake_reader()
        if self._reader is None and self._body_bytes > UNREAD_BODY_BYTES:
            self._channel.pause_reading()

    def receive_body_end(self) -> None:
        self._body_complete = True
        self.wake_reader()

    def wake_reader(self) -> None:
        """Wake `read_body`, which looks again at what has arrived."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body. Raise InferenceError where it is larger than `limit`.

        It can be read again: a request may turn out to be for another process. A body that is too
        large is read to its end without being kept: many clients read the response only after they
        have sent everything. A client that waits for "100 Continue" gets the error at once.
        """
        if not self._read_before and self.header(b"expect").lower() == b"100-continue":
            if self._announced_bytes() > limit:
                raise _too_large(self._announced_bytes(), limit)
            self._channel.write(_CONTINUE)
        self._read_before = True
        self._body_limit = limit
        if self._body_bytes > limit:
            self._pieces.clear()
        if not self._body_complete and not self._channel.closed:
            self._reader = asyncio.get_running_loop().create_future()
            self._channel.resume_reading()
            await self._reader
        if self._channel.closed:
            raise ClientGone
        if self._body_bytes > limit:
            raise _too_large(self.body_bytes, limit)
        if len(self._pieces) > 1:
            # the thread releases the interpreter's lock while it copies
            body = await in_thread_if_long(
                self._body_bytes // _BYTES_PER_SIZE, b"".join, self._pieces
            )
            self._pieces = [body]
        return self._pieces[0] if self._pieces else b""

    def _announced_bytes(self) -> int:
        return int(self.header(b"content-length") or 0)

    # -- the response

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a whole response with its length."""
        if len(body) > _PIECE_BYTES:
            await self.respond_in_pieces(status, [body], content_type, headers)
            return
        if self._channel.write_paused:
            await self._channel.wait_writable()
        if self._channel.closed:
            return
        self._begin(status, content_type, headers, b"content-length: %d\r\n" % len(body))
        self._finish(self._head if self.method == "HEAD" else self._head + body)

    async def respond_in_pieces(
        self, status: int, pieces: Sequence[Buffer], content_type: bytes, headers: Headers = ()
    ) -> None:
        """Send a whole long response with its length, no faster than the client reads.

        The pieces are neither joined nor copied at once.
        """
        if self._channel.closed:
            return
        length = sum(map(len, pieces))
        self._begin(status, content_type, headers, b"content-length: %d\r\n" % length)
        self._channel.write(self._head)
        for piece in pieces if self.method != "HEAD" else ():
            view = memoryview(piece)
            for start in range(0, len(view), _PIECE_BYTES):
                await self._channel.wait_writable()
                if self._channel.closed:
                    return
                self._channel.write(bytes(view[start : start + _PIECE_BYTES]))
                await asyncio.sleep(0)  # the writing may never have to wait
        self._finish(b"")

    def start_chunks(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        """Begin a response in chunks. Its head is sent together with the first chunk."""
        if not self._channel.closed:
            self._begin(status, content_type, headers, b"transfer-encoding: chunked\r\n")

    async def send_chunk(self, data: bytes) -> None:
        """Send one chunk. Wait first where the client reads more slowly than the server writes."""
        if self._channel.write_paused:
            await self._channel.wait_writable()
        if not self._channel.closed:
            self._channel.write(self._take_head() + self._frame(data))

    async def end_chunks(self, last: bytes = b"") -> None:
        """Send the last chunk and the end of the response."""
        if self._channel.write_paused:
            await self._channel.wait_writable()
        if not self._channel.closed:
            end = b"" if self.method == "HEAD" else b"0\r\n\r\n"
            self._finish(self._take_head() + self._frame(last) + end)

    def _begin(self, status: int, content_type: bytes, headers: Headers, framing: bytes) -> None:
        if self.started:
            raise RuntimeError("a response was begun after another one to the same request")
        lines = [_first_lines(status, content_type)]
        if self.more_headers:
            headers = [*headers, *self.more_headers]
        for name, value in headers:
            lines.append(_header_line(name, value))
        lines.append(framing)
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)
        self.started = True
        if self.trace is not None:
            self.trace.stamp("HTTP_SEND_START")

    def _take_head(self) -> bytes:
        """Return the head where it is not sent yet."""
        if not self.started or self.complete:
            raise RuntimeError("a chunk was sent before the response's head or after its end")
        head = self._head
        self._head = b""
        return head

    def _frame(self, data: bytes) -> bytes:
        """Return one chunk as it is sent. An empty one would be the end of the response."""
        if not data or self.method == "HEAD":
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _finish(self, data: bytes) -> None:
        self._channel.write_last(data)
        self.complete = True
        if self.trace is not None:
            self.trace.stamp("HTTP_SEND_END")
        self._channel.response_sent(self.keep_alive)

    def cancel_on_disconnect(self) -> CancelOnDisconnect:
        """Cancel the work within as soon as the client disconnects, and raise ClientGone instead.

        The body must have been read before.
        """
        return CancelOnDisconnect(self._channel)


class CancelOnDisconnect:
    """The context manager of `Exchange.cancel_on_disconnect`."""

    __slots__ = ("_cancel", "_channel", "_task")

    def __init__(self, channel: Channel) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._channel = channel
        self._task = task
        self._cancel = task.cancel

    def __enter__(self) -> None:
        self._channel.watch_disconnect(self._cancel)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.unwatch_disconnect(self._cancel)
        # A count above 0 means that the task was cancelled for another reason, too.
        if kind is asyncio.CancelledError and self._channel.closed and not self._task.uncancel():
            raise ClientGone from None


Handler = Callable[[Exchange], Awaitable[None]]


def _too_large(size: int, limit: int) -> InferenceError:
    return InferenceError(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} "
        "bytes. Use --http-max-input-size to increase the limit."
    )


@lru_cache(maxsize=256)
def _first_lines(status: int, content_type: bytes) -> bytes:
    phrase = HTTPStatus(status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase) + _header_line(b"content-type", content_type)


@lru_cache(maxsize=256)
def _header_line(name: bytes, value: bytes) -> bytes:
    if _NOT_IN_HEADER_NAME.search(name) or _NOT_IN_HEADER_VALUE.search(value):
        raise RuntimeError(f"{name!r} with {value!r} is not a header")
    return name.lower() + b": " + value + b"\r\n"


class Refused(Exception):
    """A request that is refused by its head: a wrong method or a missing key."""

    def __init__(self, status: int, message: str, content_type: bytes = TEXT) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.content_type = content_type


def check_site(origin_policy: OriginPolicy, exchange: Exchange) -> bool:
    """Raise Refused where a web page may not send this request.

    Returns whether the request asks only if a page may send another one (a preflight). It is
    answered without a key, because browsers send none with it.
    """
    host = origin = fetch_site = b""
    for name, value in exchange.headers:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            fetch_site = value
    if not _knows_host(origin_policy, host):
        called = host.decode("latin-1")
        raise Refused(403, f"This server is not called '{called}'. Allow it with --allowed-host")
    if not origin and not fetch_site:
        return False  # not a browser
    return _check_page(
        origin_policy, exchange, *(one.decode("latin-1") for one in (origin, host, fetch_site))
    )


@lru_cache(maxsize=256)
def _knows_host(origin_policy: OriginPolicy, host: bytes) -> bool:
    return origin_policy.knows_host(host.decode("latin-1"))


def _check_page(
    origin_policy: OriginPolicy, exchange: Exchange, origin: str, host: str, fetch_site: str
) -> bool:
    if origin_policy.names(origin):
        exchange.more_headers = _allow_origin(origin_policy, exchange)
        if exchange.method == "OPTIONS":
            return True
    if exchange.method in _READING_METHODS:
        return False  # a browser does not show the response to pages of other origins
    _check_origin(origin_policy, origin, host, fetch_site)
    content_type = exchange.header(b"content-type").partition(b";")[0].strip().lower()
    if content_type in _FORM_TYPES:
        # a page may send these types to any server, without a preflight
        text = f"A browser must send application/json, not {content_type.decode('latin-1')}"
        raise Refused(415, text)
    return False


def check_page_for_work(origin_policy: OriginPolicy, exchange: Exchange) -> None:
    """Raise Refused where a page of another origin asks for work with a method that only reads.

    The page does not see the response, but the engines would work for it.
    """
    if exchange.method in _READING_METHODS:
        names = (b"origin", b"host", b"sec-fetch-site")
        origin, host, fetch_site = (exchange.header(name).decode("latin-1") for name in names)
        if origin or fetch_site:
            _check_origin(origin_policy, origin, host, fetch_site)


def _check_origin(origin_policy: OriginPolicy, origin: str, host: str, fetch_site: str) -> None:
    if not origin_policy.accepts(origin, host, fetch_site):
        page = f"Pages of the origin '{origin}'" if origin else "Pages of other origins"
        raise Refused(403, f"{page} may not use this server. Allow it with --cors-origin")


def _allow_origin(origin_policy: OriginPolicy, exchange: Exchange) -> Headers:
    """Return the headers that let a page of a named origin read the response."""
    origin = b"*" if ANY in origin_policy.origins else exchange.header(b"origin")
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"Origin"),
    ]
    if exchange.method == "OPTIONS":
        asked = exchange.header(b"access-control-request-headers")
        headers += [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", asked or b"*"),
            (b"access-control-max-age", b"600"),
        ]
        if exchange.header(b"access-control-request-private-network"):
            headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def check_access(access: Access, api: str, exchange: Exchange) -> None:
    """Raise Refused where the request may not call this API."""
    if not access.guarded and api not in access.http_restrictions:
        return

    def read_header(name: str) -> str | None:
        value = exchange.header(name.encode("latin-1", "replace"))
        return value.decode("latin-1") if value else None

    refusal = access.refuse_http(api, read_header)
    if refusal is not None:
        raise Refused(refusal.status, refusal.message)
    access.note_tenant(read_header)
