"""An HTTP server on a loopback port, and a client that returns status line, headers and chunks."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.server.http.connection import ConnectionLimits
from slipstream.server.http.exchange import Handler
from slipstream.server.http.server import HttpServer
from slipstream.server.kserve.certificates import CertificateFiles


class RunningServer:
    """`with RunningServer(app) as server:` serves the app on `server.port` in a thread."""

    def __init__(
        self,
        app: Handler,
        limits: ConnectionLimits | None = None,
        certificate: CertificateFiles | None = None,
    ) -> None:
        self._server = HttpServer(app, limits, certificate)
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    @property
    def thread_id(self) -> int | None:
        """The thread of the server's event loop."""
        return self._thread.ident

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await self._server.open(listening)
            self.port = listening.getsockname()[1]
            self._ready.set()
            await self._stop.wait()
            await self._server.close(0)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.005)


@dataclass
class Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]]  # names in lower case
    framing: str  # content-length, chunked, close
    body: bytes
    chunks: list[bytes] = field(default_factory=list)
    interim: bytes = b""  # interim response: 100 Continue
    closed: bool = False  # whether the server closed after the answer

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class Connection:
    def __init__(self, port: int, timeout: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._buffer = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self._buffer += data
        return bool(data)

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._buffer:
            if not self._more():
                return None
        found, self._buffer = self._buffer.split(mark, 1)
        return found

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            assert self._more(), "the connection ended inside a body"
        found = self._buffer[:count]
        self._buffer = self._buffer[count:]
        return found

    def head(self) -> Answer | None:
        """Return status line and headers, or None when the server closes without an answer."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        _, status, reason = first.split(" ", 2)
        if status == "100":
            answer = self.head()
            if answer is not None:
                answer.interim = head + b"\r\n\r\n"
            return answer
        headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
        names = dict(headers)
        chunked = names.get("transfer-encoding") == "chunked"
        framing = (
            "chunked" if chunked else "content-length" if "content-length" in names else "close"
        )
        return Answer(int(status), reason, headers, framing, b"")

    def chunk(self) -> bytes:
        """Return one chunk. It is empty at the end of the body."""
        size = self._until(b"\r\n")
        assert size is not None, "the connection ended between chunks"
        data = self._exactly(int(size, 16))
        assert self._exactly(2) == b"\r\n"
        return data

    def answer(self, head_only: bool = False) -> Answer | None:
        answer = self.head()
        if answer is None or head_only:
            return answer
        if answer.framing == "chunked":
            while data := self.chunk():
                answer.chunks.append(data)
            answer.body = b"".join(answer.chunks)
        else:
            answer.body = self._exactly(int(answer.header("content-length") or 0))
        return answer

    def is_closed(self, wait: float) -> bool:
        """Return whether the server closes within `wait` seconds."""
        self.socket.settimeout(wait)
        try:
            return not self._more()
        except TimeoutError:
            return False


def request_bytes(
    method: str,
    path: str,
    headers: list[list[str]],
    body: bytes | None,
    version: str = "HTTP/1.1",
    host: bool = True,
) -> bytes:
    lines = [f"{method} {path} {version}"]
    if host:
        lines.append("Host: localhost")
    lines += [f"{name}: {value}" for name, value in headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


def post(port: int, path: str, body: bytes, headers: list[list[str]] | None = None) -> Answer:
    with Connection(port) as connection:
        connection.send(request_bytes("POST", path, headers or [], body))
        answer = connection.answer()
        assert answer is not None
        return answer


def get(port: int, path: str, method: str = "GET") -> Answer:
    with Connection(port) as connection:
        connection.send(request_bytes(method, path, [], None))
        answer = connection.answer(head_only=method == "HEAD")
        assert answer is not None
        return answer
