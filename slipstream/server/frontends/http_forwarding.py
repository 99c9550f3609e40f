"""The HTTP port of a secondary front end.

It answers requests for inference with models that it has. All others go to the primary front end
as they are, and its responses come back as they arrive.
"""

from __future__ import annotations

import asyncio
import logging
import re

import httptools

from slipstream.server.frontends.upstream import HTTP, Streams, Upstream
from slipstream.server.http.exchange import JSON, RETRY_AFTER, ClientGone, Exchange, Handler
from slipstream.server.kserve.errors import InferenceError, NeedsPrimary
from slipstream.server.kserve.triton_json import write_error

logger = logging.getLogger(__name__)

# What does not change the server and needs nothing but models. POST only, but for the last.
_MODEL = r"/v2/models/[^/]+(/versions/[0-9]+)?/(infer|generate|generate_stream)"
_V1 = r"/v1/(completions|chat/completions|messages|messages/count_tokens|embeddings|rerank|score)"
_OTHERS = r"/(tokenize|detokenize|rerank|score|v2/rerank)"
_LOCAL = re.compile(f"{_MODEL}|{_V1}|{_OTHERS}")
_LIVE = "/v2/health/live"

_READ_BYTES = 1 << 16
# headers of one connection, and those that are written here
_NOT_FORWARDED = frozenset(
    (b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"transfer-encoding")
)
_NOT_RETURNED = _NOT_FORWARDED | {b"content-type"}
_LOST = write_error("the server is restarting or shutting down")


class FrontendRoutes:
    """The handler of the HTTP port."""

    def __init__(self, app: Handler, forwarder: HttpForwarder) -> None:
        """`app`: answers what this front end serves itself, or raises NeedsPrimary."""
        self._app = app
        self._forwarder = forwarder
        self.forward_all = False

    async def __call__(self, exchange: Exchange) -> None:
        if not self.forward_all and is_local(exchange.method, exchange.path):
            try:
                await self._app(exchange)
                return
            except NeedsPrimary:
                pass
        try:
            await self._forwarder.forward(exchange)
        except ClientGone:
            return


def is_local(method: str, path: str) -> bool:
    """Return whether a secondary front end may answer this itself."""
    if method == "GET":
        return path == _LIVE
    return method == "POST" and _LOCAL.fullmatch(path) is not None


class HttpForwarder:
    """Sends requests to the primary front end, each over a connection of its own."""

    def __init__(self, upstream: Upstream, most_body_bytes: int) -> None:
        self._upstream = upstream
        self._most_body_bytes = most_body_bytes

    async def forward(self, exchange: Exchange) -> None:
        try:
            body = await exchange.read_body(self._most_body_bytes)
            head = _write_head(exchange, len(body))
        except InferenceError:
            # The primary front end knows the format of this error. It responds to the announced
            # length, without the body.
            body = b""
            length = max(self._most_body_bytes + 1, exchange.body_bytes)
            head = _write_head(exchange, length, b"expect: 100-continue\r\n")
        exchange.more_headers = ()  # the primary front end adds its own
        with exchange.cancel_on_disconnect():
            try:
                streams = await self._upstream.connect(HTTP)
                try:
                    await _exchange_over(streams, head + body, exchange)
                finally:
                    streams[1].close()
            except (OSError, EOFError, httptools.HttpParserError) as error:
                if exchange.started:
                    raise
                logger.warning("the primary front end did not respond: %s", error)
                await exchange.respond(503, _LOST, JSON, (RETRY_AFTER,))


def _write_head(exchange: Exchange, length: int, more: bytes = b"") -> bytes:
    """Return the head of a request with a body of this length. Names are those of the client."""
    lines = [b"%b %b HTTP/1.1\r\n" % (exchange.method.encode(), exchange.target)]
    announced = False
    for name, value in exchange.raw_headers:
        lower = name.lower()
        if lower == b"content-length":
            announced = True
            lines.append(b"%b: %d\r\n" % (name, length))
        elif lower not in _NOT_FORWARDED:
            lines.append(b"%b: %b\r\n" % (name, value))
    if not announced:
        lines.append(b"content-length: %d\r\n" % length)
    # The connection is kept by the primary front end: one that closes it before it has read a
    # body which it does not need would reset it, and the response would be lost.
    return b"".join([*lines, more, b"\r\n"])


async def _exchange_over(streams: Streams, request: bytes, exchange: Exchange) -> None:
    """Send a request and pass on its response as it arrives."""
    reader, writer = streams
    sending = asyncio.ensure_future(_send(writer, request))
    response = _Response()
    try:
        while not response.complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise EOFError("the connection was closed before the end of the response")
            response.parser.feed_data(data)
            if response.head_complete and exchange.method == "HEAD":
                response.complete = True
            if response.chunked:
                await response.pass_on(exchange)
        await response.finish(exchange)
    finally:
        sending.cancel()


async def _send(writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    try:
        await writer.drain()
    except OSError:
        return  # reading reports it, too


class _Response:
    """A response while it arrives. The parser calls the methods with `on_`."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False
        self.head_complete = False
        self.chunked = False
        self._length = 0
        self._content_type = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value
        elif lower == b"transfer-encoding":
            self.chunked = True
        elif lower == b"content-length":
            self._length = int(value)
        elif lower not in _NOT_RETURNED:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    async def pass_on(self, exchange: Exchange) -> None:
        """Send what has arrived of a response in chunks."""
        if self.head_complete and not exchange.started:
            status = self.parser.get_status_code()
            exchange.start_chunks(status, self._content_type, self._headers)
        if self._pieces:
            await exchange.send_chunk(self._take())

    async def finish(self, exchange: Exchange) -> None:
        if self.chunked:
            await exchange.end_chunks()
            return
        # The response to HEAD has only the length of a body.
        body = bytes(self._length) if exchange.method == "HEAD" else self._take()
        status = self.parser.get_status_code()
        await exchange.respond(status, body, self._content_type, self._headers)

    def _take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
