"""One HTTP/1.1 connection: an `asyncio.Protocol` on the parser of `httptools`.

The connection bounds the size of a request's head and the time in which a request must arrive. It
closes on anything that is not HTTP without an answer, as Triton does. It ignores `Upgrade`, because
it knows no other protocol, and answers the request as HTTP/1.1.

Writes made during one iteration of the event loop go out as one piece, because a system call costs
as much as writing an event does.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, cast

import httptools

from slipstream.server.http.exchange import TEXT, Exchange, Handler
from slipstream.server.log.repeated import RepeatedWarning

logger = logging.getLogger(__name__)

# A read of more bytes probably has not emptied the socket.
_LONG_READ_BYTES = 128 << 10


def _last_response(status: bytes, problem: bytes) -> bytes:
    body = b'{"error":"%b"}' % problem
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
    )


_TOO_SLOW_RESPONSE = _last_response(b"408 Request Timeout", b"the request did not arrive in time")
_TWO_HOSTS = "the request has more than one Host header"
_NO_HOST = "the request has no Host header"


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of one client."""

    url_bytes: int = 8192
    head_bytes: int = 64 << 10  # size of all headers of a request, and of all trailers
    # Chunks in the body of a request: a tiny chunk costs far more than the bytes it carries.
    chunks: int = 65536
    # Seconds in which a request must arrive, head and body. Each `arrival_bytes_per_second` bytes
    # add one second, but never more than `arrival_seconds` from the time at which they arrive.
    arrival_seconds: float = 60.0
    arrival_bytes_per_second: float = 1024
    idle_seconds: float = 120.0  # time without a request after which a connection is closed
    # Size of writes that are held back until the end of the event loop's iteration.
    joined_bytes: int = 64 << 10


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time of a connection. An asyncio event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer: ...


@dataclass
class ConnectionSet:
    """The open connections of one server, and the tasks that answer their requests."""

    connections: set[HttpConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # called for each request that is not HTTP
    warn_of_invalid: Callable[[], None] = field(
        default_factory=lambda: RepeatedWarning(logger, "Invalid HTTP request received.")
    )
    _unsent: list[HttpConnection] = field(default_factory=list)  # those with data to send

    def flush_later(self, connection: HttpConnection) -> None:
        """Flush a connection at the end of the event loop's iteration."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._unsent.append(connection)

    def _flush_all(self) -> None:
        unsent = self._unsent
        self._unsent = []
        for connection in unsent:
            connection.flush()


class HttpConnection(asyncio.Protocol):
    """One client's connection. Its requests are answered one after the other."""

    def __init__(
        self,
        handler: Handler,
        members: ConnectionSet,
        limits: ConnectionLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._handler = handler
        self._members = members
        self._limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._clock: Clock = clock or self._loop
        self._parser = self._create_parser()
        self._transport = asyncio.Transport()  # replaced when the connection is made
        self.closed = False

        self._current: Exchange | None = None  # request that is being answered
        self._incoming: Exchange | None = None  # request whose body is arriving
        self._waiting: deque[Exchange] = deque()  # requests that arrived before their turn
        self._disconnect_callback: Callable[[], object] | None = None

        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._raw_headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0  # parsed headers of this request
        self._head_bytes = 0  # bytes received since the last request or piece of a body
        self._chunks = 0
        self._in_head = True
        self._upgrade = False  # whether the parser stops at an upgrade after this head
        self._arriving = False  # whether a request has begun to arrive and is not complete

        self._idle_deadline = 0.0
        self._arrival_deadline = 0.0  # 0: not set
        self._timer: Timer | None = None
        self._timer_time = 0.0

        self._read_paused = False
        self.write_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0

    def _create_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Data after a request with "Connection: close" is not an error: that request is answered.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._members.connections.add(self)
        self._expect_request()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._members.connections.discard(self)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        del self._parser  # which refers to this connection
        self.resume_writing()
        if self._current is not None:
            self._current.wake_reader()
        if self._disconnect_callback is not None:
            self._disconnect_callback()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._members.warn_of_invalid()
            self.close()
            return
        if self._head_bytes > self._limits.head_bytes:
            self.close()
        elif self._arriving:
            self._expect_rest(len(data))
        if len(data) > _LONG_READ_BYTES:
            self._read_later()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # -- called by the server

    def shut_down(self) -> None:
        """Close now, or after the response that is being sent."""
        if self._current is None:
            self.close()
        else:
            self._current.keep_alive = False

    # -- parsing

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._parse_head_without_upgrade()

    def _parse_head_without_upgrade(self) -> None:
        """Parse the head of a request again without its `Upgrade`.

        At an upgrade the parser drops the body and takes what follows for another protocol.
        """
        method = self._parser.get_method()
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._url, version)]
        for name, value in self._raw_headers:
            if name.lower() != b"upgrade":
                lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(b"\r\n")
        self._upgrade = False
        self._parser = self._create_parser()
        self._parser.feed_data(b"".join(lines))

    def on_message_begin(self) -> None:
        self._arriving = True
        self._url = b""
        self._headers = []
        self._raw_headers = []
        self._header_bytes = 0
        self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.url_bytes:
            raise ValueError("the URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._limits.head_bytes:
            raise ValueError("the headers are too long")
        if self._in_head:  # trailers are ignored: access was decided by the headers
            self._raw_headers.append((name, value))
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise ValueError("this server is not a proxy")
            self._upgrade = True
            return
        self._check_host()
        self._in_head = False
        self._head_bytes = 0
        exchange = Exchange(
            self,
            method.decode("ascii"),
            read_path(self._url),
            self._headers,
            self._raw_headers,
            parser.get_http_version() != "1.0" and parser.should_keep_alive(),
            self._url,
        )
        self._incoming = exchange
        if self._current is None:
            self._start(exchange)
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def _check_host(self) -> None:
        """Refuse a request that a proxy could understand differently."""
        hosts = 0
        for name, _ in self._headers:
            if name == b"host":
                hosts += 1
        if hosts == 1 or (hosts == 0 and self._parser.get_http_version() == "1.0"):
            return
        problem = _TWO_HOSTS if hosts else _NO_HOST
        if self._current is None:
            self.write(_last_response(b"400 Bad Request", problem.encode()))
        raise ValueError(problem)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise ValueError("too many chunks")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        exchange = self._incoming
        if exchange is not None and not exchange.complete:
            exchange.receive_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._in_head = True
        self._head_bytes = 0
        self._arriving = False
        self._arrival_deadline = 0.0
        exchange = self._incoming
        self._incoming = None
        if exchange is None:
            return
        exchange.receive_body_end()
        if self._current is None:  # answered before the request was complete
            self._expect_request()

    # -- answering

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        task = self._loop.create_task(self._answer(exchange))
        self._members.tasks.add(task)
        task.add_done_callback(self._members.tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
            if not exchange.complete and not self.closed:
                raise RuntimeError("the handler returned before the end of its response")
        except asyncio.CancelledError:
            self.close()  # the server stops and has waited long enough
        except Exception:
            logger.exception("%s %s failed:", exchange.method, exchange.path)
            if exchange.started:
                # close the connection, so that the client sees that the response is truncated
                self.close()
            else:
                exchange.keep_alive = False
                await exchange.respond(500, b"Internal Server Error", TEXT)

    def response_sent(self, keep_alive: bool) -> None:
        """Continue with the next request, or close. Called by the exchange."""
        self._current = None
        if not keep_alive:
            self.close()
        if self._transport.is_closing():
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif not self._arriving:
            self._expect_request()
        self.resume_reading()

    def watch_disconnect(self, callback: Callable[[], object]) -> None:
        """Call back when the client disconnects, or now if it has."""
        self._disconnect_callback = callback
        if self.closed:
            callback()
        else:
            self.resume_reading()  # a connection that is not read never reports its end

    def unwatch_disconnect(self, callback: Callable[[], object]) -> None:
        if self._disconnect_callback is callback:
            self._disconnect_callback = None

    # -- time

    def _expect_request(self) -> None:
        """Close the connection if the next request does not begin in time."""
        self._idle_deadline = self._clock.time() + self._limits.idle_seconds
        self._set_timer(self._idle_deadline)

    def _expect_rest(self, received: int) -> None:
        """Close the connection if the rest of the request does not arrive in time."""
        latest = self._clock.time() + self._limits.arrival_seconds
        if self._arrival_deadline:
            earned = received / self._limits.arrival_bytes_per_second
            self._arrival_deadline = min(self._arrival_deadline + earned, latest)
        else:
            self._arrival_deadline = latest
        self._set_timer(self._arrival_deadline)

    def _set_timer(self, deadline: float) -> None:
        """Wake up at `deadline` or earlier. A timer is not moved for each request."""
        if self._timer is not None:
            if self._timer_time <= deadline:
                return
            self._timer.cancel()
        self._timer_time = deadline
        self._timer = self._clock.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._clock.time()
        if self._arriving:
            behind_another = self._in_head and self._current is not None
            if self._read_paused or behind_another:  # the server keeps the client waiting
                self._arrival_deadline = now + self._limits.arrival_seconds
            deadline = self._arrival_deadline
        else:
            deadline = self._idle_deadline if self._current is None else math.inf
        if deadline <= now:
            self._time_out()
        elif deadline < math.inf:
            self._set_timer(deadline)

    def _time_out(self) -> None:
        if self._transport.is_closing():
            return
        answered = self._incoming is not None and self._incoming.started
        if self._arriving and not answered:
            self.write(_TOO_SLOW_RESPONSE)
        self.close()

    # -- reading and writing

    def pause_reading(self) -> None:
        if not self._read_paused and not self._transport.is_closing():
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless requests wait: each piece of data may bring thousands more of them."""
        if self._read_paused and not self._waiting and not self._transport.is_closing():
            self._read_paused = False
            self._transport.resume_reading()

    def _read_later(self) -> None:
        """Read on after the event loop's other work. It would read up to 8 MiB without a pause."""
        if not self._read_paused and not self._transport.is_closing():
            self.pause_reading()
            self._loop.call_soon(self.resume_reading)

    async def wait_writable(self) -> None:
        """Wait until the client has read enough of what was written."""
        if self.write_paused and not self.closed:
            self._writable = self._loop.create_future()
            await self._writable

    def write(self, data: bytes) -> None:
        """Send data at the end of the event loop's iteration, joined with other writes."""
        if not self._unsent:
            self._members.flush_later(self)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > self._limits.joined_bytes:
            self.flush()  # so that the transport can report that it has too much to send

    def write_last(self, data: bytes) -> None:
        """Send the end of a response at once. Nothing that follows could be joined with it."""
        if self._unsent:
            self._unsent.append(data)
            self.flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def flush(self) -> None:
        if self._unsent:
            joined = b"".join(self._unsent)
            self._unsent = []
            self._unsent_bytes = 0
            if not self._transport.is_closing():
                self._transport.write(joined)

    def close(self) -> None:
        """Close the connection after everything that was written."""
        self.flush()
        self._transport.close()


@lru_cache(maxsize=256)
def read_path(url: bytes) -> str:
    """Return the path of a request's target. Clients repeat a few targets."""
    path: bytes = httptools.parse_url(url).path
    return path.decode("ascii")
