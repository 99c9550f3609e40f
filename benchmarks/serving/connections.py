"""One streamed request at a time over one connection: server-sent events, or gRPC.

The client shares the machine with the server, so it does only what a measurement needs. HTTP is
parsed by httptools. Every event is decoded and every error is reported.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import httptools
import msgspec
from grpc_load import GrpcFrames

from serving.cells import Answer

_EVENT = b"data: "
_DONE = b"[DONE]"
Done = Callable[[Answer], None]


class StreamConnection(Protocol):
    closed: bool

    def send(self, body: bytes, tokens: int, done: Done) -> None:
        """Send a request for `tokens` tokens. `done` is called once, with its answer."""

    def fail(self, reason: str) -> None:
        """End the request in flight with an error."""


class _Request:
    """The request in flight of a connection."""

    def __init__(self, tokens: int, done: Done) -> None:
        self.expected = tokens
        self.done = done
        self.sent = time.monotonic_ns()
        self.times: list[int] = []  # of events with text
        self.tokens = 0
        self.prompt_tokens = 0
        self.error = ""

    def add(self, text: str, now: int) -> None:
        if text:
            self.times.append(now)

    def complete(self) -> None:
        if not self.error and not self.times:
            self.error = "the answer has no text"
        if not self.error and self.tokens != self.expected:
            self.error = f"{self.tokens} tokens instead of {self.expected}"
        times = self.times or [self.sent]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        answer = Answer(
            self.sent, times[0], times[-1], gaps, self.tokens, self.prompt_tokens, self.error
        )
        self.done(answer)


class EventStream(asyncio.Protocol):
    """A keep-alive HTTP connection whose answers are server-sent events."""

    def __init__(self, path: str, host: str = "127.0.0.1") -> None:
        self._head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._transport: Any = None
        self._parser: Any = None
        self._request: _Request | None = None
        self._rest = b""  # an event that has not ended yet
        self._now = 0
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.fail(f"the server closed the connection: {error or 'no reason'}")

    def send(self, body: bytes, tokens: int, done: Done) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        head = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        self._request = _Request(tokens, done)
        self._transport.write(head + body)

    def fail(self, reason: str) -> None:
        request = self._request
        if request is not None:
            self._request = None
            request.error = request.error or reason
            request.complete()
        if not self.closed:
            self.closed = True
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self.fail(f"cannot read the answer: {error}")

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a part of the body."""
        request = self._request
        if request is None:
            return
        if self._parser.get_status_code() != 200:
            request.error += body.decode(errors="replace")
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(_EVENT) and not event.endswith(_DONE):
                _read_event(request, msgspec.json.decode(event[len(_EVENT) :]), self._now)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of an answer."""
        request = self._request
        self._request = None
        if request is not None:
            code = self._parser.get_status_code()
            if code != 200:
                request.error = f"HTTP {code}: {request.error[:300]}"
            request.complete()


def _read_event(request: _Request, event: dict[str, Any], now: int) -> None:
    """Read an event of OpenAI's completions or of Triton's generate_stream."""
    if "text_output" in event:
        request.add(event["text_output"], now)
        request.tokens = request.expected  # the server's counter is compared after the load
        return
    if "error" in event:
        request.error = request.error or str(event["error"])
    for choice in event.get("choices") or ():
        request.add(choice.get("text") or "", now)
    usage = event.get("usage")
    if usage:
        request.tokens = usage["completion_tokens"]
        request.prompt_tokens = usage["prompt_tokens"]


class GrpcStream(GrpcFrames):
    """A gRPC connection that makes one ModelStreamInfer call after the other."""

    def __init__(self) -> None:
        from slipstream.server.grpc.protocol import messages

        super().__init__("/inference.GRPCInferenceService/ModelStreamInfer")
        self._response = messages.ModelStreamInferResponse
        self._request: _Request | None = None
        self._rest = b""  # a message that has not ended yet
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.write(self.opening())

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self.fail(f"the server closed the connection: {error or 'no reason'}")

    def send(self, body: bytes, tokens: int, done: Done) -> None:
        self._rest = b""
        self._request = _Request(tokens, done)
        self.transport.write(self.call(body))

    def fail(self, reason: str) -> None:
        request = self._request
        if request is not None:
            self._request = None
            request.error = request.error or reason
            request.complete()
        if not self.closed:
            self.closed = True
            self.transport.abort()

    def take_data(self, stream: int, payload: bytes) -> None:
        request = self._request
        now = time.monotonic_ns()
        data = self._rest + payload
        position = 0
        while len(data) - position >= 5:
            end = position + 5 + int.from_bytes(data[position + 1 : position + 5], "big")
            if end > len(data):
                break
            if request is not None:
                self._read_message(request, data[position + 5 : end], now)
            position = end
        self._rest = data[position:]

    def _read_message(self, request: _Request, message: bytes, now: int) -> None:
        found = self._response.FromString(message)
        if found.error_message:
            request.error = request.error or found.error_message
            return
        response = found.infer_response
        contents = response.raw_output_contents
        for output, content in zip(response.outputs, contents, strict=False):
            if output.name == "text_output":
                # a BYTES tensor of one text: four bytes with its length, then the text
                request.add(content[4:].decode(errors="replace"), now)
                request.tokens = request.expected  # the server's counter is compared later

    def take_end(self, stream: int, payload: bytes) -> bytes:
        request = self._request
        self._request = None
        if request is not None:
            request.complete()
        return b""

    def take_reset(self, payload: bytes) -> None:
        self.fail(f"the server reset the stream: {payload[:200]!r}")
