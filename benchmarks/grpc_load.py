"""Load over gRPC for `server.py`: just enough of HTTP/2 to send one call again and again.

gRPC's own client for Python costs more than either server does, so that its rate would be the
client's. What this one sends is what real clients send: the headers in full once, and as references
to them in every later call.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

PATH = "/inference.GRPCInferenceService/ModelInfer"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACKNOWLEDGED = _END_STREAM = 1
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
    assert len(data) < 127, "longer ones have a longer length"
    return bytes((len(data),)) + data


# Numbers are those of the static table of RFC 7541: 3 is ":method POST", 6 ":scheme http"; 0x40
# adds what follows to the dynamic table, whose newest entry is number 62.
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
    """Keeps so many calls going: as soon as one is answered, the next is sent."""

    def __init__(self, body: bytes, calls: int) -> None:
        self._message = struct.pack(">BI", 0, len(body)) + body
        self._calls = calls
        self._transport: Any = None
        self._received = bytearray()
        self._stream = -1
        self._answered: dict[int, int] = {}  # bytes of the answer, by stream
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
        position, end, replies = 0, len(received), []
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
        """What a frame calls for."""
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
        length, self._unacknowledged = self._unacknowledged, 0
        return _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", length))

    def _complete(self, stream: int, payload: bytes) -> bytes:
        """All answers are as long as the first; a call that fails has none."""
        length = self._answered.pop(stream)
        self._expected = self._expected or length
        if not length or length != self._expected:
            self.bad = self.bad or payload
        self.answers += 1
        return self._call()

    def close(self) -> None:
        self._transport.abort()


async def grpc_rate(port: int, body: bytes, concurrency: int, seconds: float) -> float:
    """ModelInfer calls a second, up to eight at once on a connection."""
    event_loop, count = asyncio.get_running_loop(), max(1, concurrency // 8)
    connections: list[GrpcConnection] = []
    for _ in range(count):
        made = await event_loop.create_connection(
            lambda: GrpcConnection(body, concurrency // count), "127.0.0.1", port
        )
        connections.append(made[1])
    await asyncio.sleep(min(0.3, seconds / 4))  # until everyone is at it
    before, began = sum(one.answers for one in connections), time.monotonic()
    await asyncio.sleep(seconds)
    answers, took = sum(one.answers for one in connections) - before, time.monotonic() - began
    bad = next((one for one in connections if one.bad or one.lost), None)
    for connection in connections:
        connection.close()
    if bad is not None:
        raise RuntimeError(
            f"ModelInfer answered {bad.bad[:300]!r}{' and hung up' if bad.lost else ''}"
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
