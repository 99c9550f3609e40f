"""uvicorn's HTTP parser with bounds on what comes before and around a body, and silence towards
garbage.

What is written during one turn of the event loop goes out as one piece, because a system call costs
as much as writing an event does. Whoever works on a request can ask to be told when its client
leaves. And a request that has begun to come must go on coming: a connection that is held open by a
trickle is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.server.http.exchange import Exchange, read_target

MAX_URL_BYTES = 8192
MAX_HEAD_BYTES = 64 << 10
MAX_CHUNKS = 65536  # of one request; tiny ones cost far more than the bytes they carry
# For a request to arrive in, head and body. Every KiB of it that comes adds a second, up to as many
# from then on.
PATIENCE_SECONDS = 60.0
PATIENT_BYTES_A_SECOND = 1024

MAX_JOINED_BYTES = 64 << 10

_ASGI = {"version": "3.0", "spec_version": "2.3"}

_TOO_SLOW = b'{"error":"the request did not arrive in time"}'
_TOO_SLOW_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TOO_SLOW), _TOO_SLOW)
)

RAW_HEADERS = "raw_headers"  # in the request's state: names as they were written, which ASGI lowers
DEPARTURE = "departure"  # in the request's state: how its connection tells that it is gone


class Departure:
    """Of one connection's client. Its requests run one after the other, so one listener is enough."""

    def __init__(self, keep_reading: Callable[[], None]) -> None:
        self.left = False
        self._keep_reading = keep_reading  # one that is not read from never says that it is gone
        self._listener: Callable[[], object] | None = None

    def listen(self, listener: Callable[[], object]) -> None:
        self._listener = listener
        if self.left:
            listener()
        else:
            self._keep_reading()

    def ignore(self) -> None:
        self._listener = None

    def leave(self) -> None:
        self.left = True
        if self._listener is not None:
            self._listener()


class JoiningTransport(asyncio.Transport):
    """Joins the writes of one turn of the event loop."""

    def __init__(self, transport: asyncio.Transport, event_loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._event_loop = event_loop
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: Any) -> None:
        if not self._pieces:
            self._event_loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size > MAX_JOINED_BYTES:
            self._flush()  # so that the transport can say when it has too much

    def write_last(self, data: bytes) -> None:
        """The end of an answer, with which nothing that follows could be joined."""
        if self._pieces:
            self.write(data)
            self._flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        if self._pieces:
            joined = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
            self._pieces, self._size = [], 0
            if not self._transport.is_closing():  # the client may have left since
                self._transport.write(joined)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class PipelineFlow(FlowControl):
    """Nothing more is read while requests that came before their turn are left: each may bring
    thousands with it.
    """

    def __init__(self, transport: Any, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class TritonProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._header_bytes = 0
        self._chunks = 0
        self._unfinished = False  # a request has begun to come, and is not here whole
        self._due = 0.0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))
        self.flow = PipelineFlow(self.transport, self.pipeline)
        self._departure = Departure(self.flow.resume_reading)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the connection broke
        self._rest_has_come()
        self._departure.leave()

    def data_received(self, data: bytes) -> None:
        # of a head or of trailers: counted anew wherever a body goes on
        self._head_bytes += len(data)
        waiting = self.timeout_keep_alive_task  # which any data ends
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()
        elif self._unfinished:
            self._expect_rest(len(data))
        elif waiting is not None and self.timeout_keep_alive_task is None and self._answered:
            # Line ends before a request are none of it: whoever sends nothing else is as silent as
            # before.
            self.timeout_keep_alive_task = self.loop.call_at(
                waiting.when(), self.timeout_keep_alive_handler
            )

    def _expect_request(self) -> None:
        """Whoever says nothing at all is not waited for without end."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_rest(self, received: int) -> None:
        most = self.loop.time() + PATIENCE_SECONDS
        if self._patience is None:
            self._due = most
            self._patience = self.loop.call_at(self._due, self._lose_patience)
        self._due = min(self._due + received / PATIENT_BYTES_A_SECOND, most)

    def _rest_has_come(self) -> None:
        self._unfinished = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        answering = self.cycle is not None and not self.cycle.response_complete
        # others of its requests come first
        if self.flow.read_paused or (answering and self._in_head):
            self._due = self.loop.time() + PATIENCE_SECONDS
        if self._due > self.loop.time():
            self._patience = self.loop.call_at(self._due, self._lose_patience)
        elif not self.transport.is_closing():
            if self._in_head or not self.cycle.response_started:
                self.transport.write(_TOO_SLOW_ANSWER)
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > MAX_URL_BYTES:
            # the parser stops, and the connection is closed below
            raise ValueError("the URL is too long")

    def on_message_begin(self) -> None:
        self._unfinished = True
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._header_bytes = 0
        self._raw_headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")
        if not self._in_head:
            return  # a trailer: what comes behind a body is not for those who judge by the headers
        self._raw_headers.append((name, value))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._chunks = False, 0, 0
        version, before = self.parser.get_http_version(), self.cycle
        self.scope = self._scope(version)
        self.cycle = Exchange(self, version != "1.0" and self.parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # the client did not wait for the answer to its last request
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _scope(self, version: str) -> Any:
        target = read_target(self.url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "path": target.path,
            "raw_path": target.raw_path,
            "query_string": target.query,
            "root_path": "",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "headers": self.headers,
            "state": {RAW_HEADERS: self._raw_headers, DEPARTURE: self._departure},
        }

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise ValueError("too many chunks")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self.cycle.response_complete:
            self.cycle.body += body
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._rest_has_come()
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()
        elif (
            not self.transport.is_closing()
        ):  # answered before it was here whole: now the next may come
            self._expect_request()

    def send_400_response(self, msg: str) -> None:
        """Triton closes on what is not HTTP, without a word."""
        self.transport.close()
