"""Load for `server.py`: a light client, because it shares the machine with the server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    path: str
    body: bytes
    unit: int  # requests or tokens of one complete answer


def http_request(load: Load) -> bytes:
    head = f"POST {load.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(load.body) + load.body


class _Connection(asyncio.Protocol):
    """Sends the request again and again, each time when its answer is complete."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: Any = None
        self._head = b""
        self._left = -1  # remaining bytes of the body; -1: not known yet, -2: chunked
        self._tail = b""
        self.answers = 0
        self.events = 0
        self.bad = b""
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[: end + 4]
            data = self._head[end + 4 :]
            if not head.startswith(b"HTTP/1.1 200"):
                self.bad = self.bad or self._head
            found = _LENGTH.search(head)
            self._left = int(found.group(1)) if found else -2
        if self._left == -2:
            self.events += data.count(b"\ndata: ")
            self._tail = (self._tail + data)[-5:]
            if self._tail == b"0\r\n\r\n":
                self._complete()
        else:
            self._left -= len(data)
            if self._left == 0:
                self._complete()

    def _complete(self) -> None:
        self.answers += 1
        self._head = b""
        self._left = -1
        self._tail = b""
        self._transport.write(self._request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True)
class Rate:
    units: float  # units of complete answers per second
    events: float = 0.0  # server-sent events per second


async def http_rate(port: int, load: Load, concurrency: int, seconds: float) -> Rate:
    event_loop = asyncio.get_running_loop()
    request = http_request(load)
    connections: list[_Connection] = []
    for _ in range(concurrency):
        _, connection = await event_loop.create_connection(
            lambda: _Connection(request), "127.0.0.1", port
        )
        connections.append(connection)
    await asyncio.sleep(min(0.3, seconds / 4))  # until all connections are busy
    before = _totals(connections)
    began = time.monotonic()
    await asyncio.sleep(seconds)
    after = _totals(connections)
    took = time.monotonic() - began
    for connection in connections:
        connection.close()
    if bad := next((one for one in connections if one.bad or one.lost), None):
        raise RuntimeError(
            f"{load.path} answered {bad.bad[:300]!r}{' and disconnected' if bad.lost else ''}"
        )
    if after[0] == before[0]:
        raise RuntimeError(f"{load.path} gave no complete answer in {seconds:g} s")
    return Rate((after[0] - before[0]) * load.unit / took, (after[1] - before[1]) / took)


def _totals(connections: list[_Connection]) -> tuple[int, int]:
    return sum(one.answers for one in connections), sum(one.events for one in connections)


def generate_load(text: str) -> Load:
    return Load("/v2/models/echo/generate", json.dumps({"text_input": text}).encode(), 1)


def infer_load(text: str) -> Load:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}
    return Load("/v2/models/echo/infer", json.dumps({"inputs": [tensor]}).encode(), 1)


def stream_load(tokens: int) -> Load:
    body = {"text_input": "5", "max_tokens": tokens, "stream": True}
    return Load("/v2/models/ensemble/generate_stream", json.dumps(body).encode(), tokens)


def completions_load(tokens: int) -> Load:
    body = {"model": "ensemble", "prompt": "5", "max_tokens": tokens, "stream": True}
    return Load("/v1/completions", json.dumps(body).encode(), tokens)


def chat_load(tokens: int) -> Load:
    messages = [{"role": "user", "content": "5"}]
    body = {"model": "ensemble", "messages": messages, "max_tokens": tokens, "stream": True}
    return Load("/v1/chat/completions", json.dumps(body).encode(), tokens)
