"""gRPC load for `server.py`: the part of HTTP/2 that is needed to repeat one call.

gRPC's Python client takes more CPU time than either server, so it would measure itself. This client
sends the same bytes as real clients: complete headers in the first call, and references to them in
later calls.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

PATH = "/inference.GRPCInferenceService/ModelInfer"
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


# The numbers are those of the static table of RFC 7541: 3 is ":method POST", 6 ":scheme http".
# 0x40 adds the following header to the dynamic table, whose newest entry is number 62.
FIRST_HEADERS = (
    b"\x83\x86"
    + b"\x44"
    + _text(PATH)
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
LATER_HEADERS = b"\x83\x86" + bytes(0x80 | number for number in (66, 65, 64, 63, 62))


class GrpcConnection(asyncio.Protocol):
    """Keeps `calls` calls in flight: each response triggers the next call."""

    def __init__(self, body: bytes, calls: int) -> None:
        self._message = struct.pack(">BI", 0, len(body)) + body
        self._calls = calls
        self._transport: Any = None
        self._received = bytearray()
        self._stream = -1
        self._answered: dict[int, int] = {}  # stream → bytes of its response so far
        self._expected = 0
        self._unacknowledged = 0
        self.answers = 0
        self.bad = b""
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW))
        opening = _PREFACE + settings + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW))
        transport.write(
            opening
            + self._call(FIRST_HEADERS)
            + b"".join(self._call() for _ in range(self._calls - 1))
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def _call(self, headers: bytes = LATER_HEADERS) -> bytes:
        self._stream += 2
        self._answered[self._stream] = 0
        head = _frame(_HEADERS, _END_HEADERS, self._stream, headers)
        return head + _frame(_DATA, _END_STREAM, self._stream, self._message)

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
        if reply := b"".join(replies):
            self._transport.write(reply)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """Process a frame and return the frames to send in response."""
        if kind == _DATA:
            self._answered[stream] += len(payload)
            return self._widen(len(payload))
        if kind == _HEADERS and flags & _END_STREAM:
            return self._complete(stream, payload)
        if kind in (_SETTINGS, _PING) and not flags & _ACKNOWLEDGED:
            return _frame(kind, _ACKNOWLEDGED, 0, payload if kind == _PING else b"")
        if kind in (_RESET, _GOAWAY):
            self.bad = self.bad or payload
        return b""

    def _widen(self, length: int) -> bytes:
        self._unacknowledged += length
        if self._unacknowledged < _WINDOW // 2:
            return b""
        update = struct.pack(">I", self._unacknowledged)
        self._unacknowledged = 0
        return _frame(_WINDOW_UPDATE, 0, 0, update)

    def _complete(self, stream: int, payload: bytes) -> bytes:
        """Check the length of a response and return the next call.

        All responses must be as long as the first. A failed call has an empty response.
        """
        length = self._answered.pop(stream)
        self._expected = self._expected or length
        if not length or length != self._expected:
            self.bad = self.bad or payload
        self.answers += 1
        return self._call()

    def close(self) -> None:
        self._transport.abort()


async def grpc_rate(port: int, body: bytes, concurrency: int, seconds: float) -> float:
    """Return ModelInfer calls per second, with up to 8 calls in flight per connection."""
    event_loop = asyncio.get_running_loop()
    count = max(1, concurrency // 8)
    connections: list[GrpcConnection] = []
    for _ in range(count):
        made = await event_loop.create_connection(
            lambda: GrpcConnection(body, concurrency // count), "127.0.0.1", port
        )
        connections.append(made[1])
    await asyncio.sleep(min(0.3, seconds / 4))  # time for all connections to start
    before = sum(one.answers for one in connections)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    answers = sum(one.answers for one in connections) - before
    took = time.monotonic() - began
    bad = next((one for one in connections if one.bad or one.lost), None)
    for connection in connections:
        connection.close()
    if bad is not None:
        raise RuntimeError(
            f"ModelInfer answered {bad.bad[:300]!r}"
            f"{' and closed the connection' if bad.lost else ''}"
        )
    if not answers:
        raise RuntimeError(f"ModelInfer gave no complete answer in {seconds:g} s")
    return answers / took


def grpc_body(text: bytes) -> bytes:
    from slipstream.server.grpc.protocol import messages

    message = messages.ModelInferRequest(model_name="echo")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    return bytes(message.SerializeToString())
