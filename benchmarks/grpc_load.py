"""gRPC load: the part of HTTP/2 that is needed to repeat a call.

gRPC's Python client takes more CPU time than either server, so it would measure itself. This client
sends the same bytes as real clients: complete headers in the first call, and references to them in
later calls.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass
from typing import Any

from server_load import Rate

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# types of frames
_DATA = 0
_HEADERS = 1
_RESET = 3
_SETTINGS = 4
_PING = 6
_GOAWAY = 7
_WINDOW_UPDATE = 8
# flags of frames
_ACKNOWLEDGED = 1
_END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_WINDOW = 1 << 30  # flow control must not limit the load
_HEAD_BYTES = 9


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "the length of a longer text needs more than one byte"
    return bytes((len(data),)) + data


def _first_headers(path: str) -> bytes:
    """Return the headers of the first call.

    The numbers are those of the static table of RFC 7541: 3 is ":method POST", 6 ":scheme http".
    0x40 adds the following header to the dynamic table, whose newest entry is number 62.
    """
    return (
        b"\x83\x86"
        + b"\x44"
        + _text(path)
        + b"\x41"
        + _text("localhost")
        + b"\x40"
        + _text("te")
        + _text("trailers")
        + b"\x5f"
        + _text("application/grpc")
        + b"\x7a"
        + _text("load")
    )


_LATER_HEADERS = b"\x83\x86" + bytes(0x80 | number for number in (66, 65, 64, 63, 62))


class GrpcFrames(asyncio.Protocol):
    """The frames of a connection. Subclasses read the data and the end of each call."""

    def __init__(self, path: str) -> None:
        self._headers = _first_headers(path)
        self._received = bytearray()
        self._stream = -1
        self._unacknowledged = 0
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def opening(self) -> bytes:
        """Return the bytes that begin a connection."""
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW))
        return _PREFACE + settings + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW))

    def call(self, body: bytes) -> bytes:
        """Return the frames of the next call."""
        self._stream += 2
        headers = self._headers
        self._headers = _LATER_HEADERS
        message = struct.pack(">BI", 0, len(body)) + body
        head = _frame(_HEADERS, _END_HEADERS, self._stream, headers)
        return head + _frame(_DATA, _END_STREAM, self._stream, message)

    @property
    def stream(self) -> int:
        """The number of the latest call's stream."""
        return self._stream

    def take_data(self, stream: int, payload: bytes) -> None:
        """Process data of a response."""

    def take_end(self, stream: int, payload: bytes) -> bytes:
        """Process the trailers of a response. Return the frames to send."""
        return b""

    def take_reset(self, payload: bytes) -> None:
        """Process the end of a stream or of the connection by the server."""

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        position = 0
        end = len(received)
        replies = []
        while end - position >= _HEAD_BYTES:
            length = int.from_bytes(received[position : position + 3], "big")
            begin = position + _HEAD_BYTES
            if end < begin + length:
                break
            stream = int.from_bytes(received[position + 5 : begin], "big")
            payload = bytes(received[begin : begin + length])
            replies.append(
                self._take(received[position + 3], received[position + 4], stream, payload)
            )
            position = begin + length
        del received[:position]
        if (reply := b"".join(replies)) and not self.transport.is_closing():
            self.transport.write(reply)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """Process a frame and return the frames to send in response."""
        if kind == _DATA:
            self.take_data(stream, payload)
            return self._widen(len(payload))
        if kind == _HEADERS and flags & _END_STREAM:
            return self.take_end(stream, payload)
        if kind in (_SETTINGS, _PING) and not flags & _ACKNOWLEDGED:
            return _frame(kind, _ACKNOWLEDGED, 0, payload if kind == _PING else b"")
        if kind in (_RESET, _GOAWAY):
            self.take_reset(payload)
        return b""

    def _widen(self, length: int) -> bytes:
        self._unacknowledged += length
        if self._unacknowledged < _WINDOW // 2:
            return b""
        update = struct.pack(">I", self._unacknowledged)
        self._unacknowledged = 0
        return _frame(_WINDOW_UPDATE, 0, 0, update)


@dataclass(frozen=True)
class GrpcLoad:
    path: str
    body: bytes
    unit: int  # requests or tokens of one complete call


class GrpcConnection(GrpcFrames):
    """Keeps `calls` calls in flight: the end of each call triggers the next one."""

    def __init__(self, load: GrpcLoad, calls: int) -> None:
        super().__init__(load.path)
        self._load = load
        self._calls = calls
        self._answered: dict[int, int] = {}  # stream → bytes of its response so far
        self._expected = 0
        self.answers = 0
        self.events = 0  # frames of data: nearly always one for each response of a stream
        self.bad = b""
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.write(self.opening() + b"".join(self._next() for _ in range(self._calls)))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def _next(self) -> bytes:
        frames = self.call(self._load.body)
        self._answered[self.stream] = 0
        return frames

    def take_data(self, stream: int, payload: bytes) -> None:
        self._answered[stream] += len(payload)
        self.events += 1

    def take_reset(self, payload: bytes) -> None:
        self.bad = self.bad or payload

    def take_end(self, stream: int, payload: bytes) -> bytes:
        """Check the length of the responses to a call and return the next call.

        Single responses must be as long as the first. A failed call has an empty response.
        """
        length = self._answered.pop(stream)
        self._expected = self._expected or length
        if not length or (length != self._expected and self._load.path == INFER):
            self.bad = self.bad or payload
        self.answers += 1
        return self._next()

    def close(self) -> None:
        self.transport.abort()


async def grpc_rate(port: int, load: GrpcLoad, concurrency: int, seconds: float) -> Rate:
    """Return the rate of calls, with up to 8 calls in flight per connection."""
    event_loop = asyncio.get_running_loop()
    count = max(1, concurrency // 8)
    connections: list[GrpcConnection] = []
    for _ in range(count):
        made = await event_loop.create_connection(
            lambda: GrpcConnection(load, concurrency // count), "127.0.0.1", port
        )
        connections.append(made[1])
    await asyncio.sleep(min(0.3, seconds / 4))  # time for all connections to start
    before = sum(one.answers for one in connections)
    events_before = sum(one.events for one in connections)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    answers = sum(one.answers for one in connections) - before
    events = sum(one.events for one in connections) - events_before
    took = time.monotonic() - began
    bad = next((one for one in connections if one.bad or one.lost), None)
    for connection in connections:
        connection.close()
    if bad is not None:
        raise RuntimeError(
            f"{load.path} answered {bad.bad[:300]!r}"
            f"{' and closed the connection' if bad.lost else ''}"
        )
    if not answers:
        raise RuntimeError(f"{load.path} gave no complete answer in {seconds:g} s")
    return Rate(answers * load.unit / took, events / took)


def grpc_infer_load(text: bytes) -> GrpcLoad:
    from slipstream.server.grpc.protocol import messages

    message = messages.ModelInferRequest(model_name="echo")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    return GrpcLoad(INFER, bytes(message.SerializeToString()), 1)


def grpc_stream_load(tokens: int) -> GrpcLoad:
    from slipstream.server.grpc.protocol import messages

    message = messages.ModelInferRequest(model_name="ensemble")
    for name, datatype, data in (
        ("text_input", "BYTES", struct.pack("<I", 1) + b"5"),
        ("max_tokens", "INT32", struct.pack("<i", tokens)),
        ("stream", "BOOL", b"\x01"),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        message.raw_input_contents.append(data)
    return GrpcLoad(STREAM_INFER, bytes(message.SerializeToString()), tokens)
