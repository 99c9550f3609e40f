"""uvicorn's HTTP parser with bounds on what comes before and around a body, and silence towards garbage."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_URL_BYTES = 8192
MAX_HEAD_BYTES = 64 << 10
MAX_CHUNKS = 65536  # of one request; tiny ones cost far more than the bytes they carry

RAW_HEADERS = "raw_headers"  # in the request's state: names as they were written, which ASGI lowers


class TritonProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._chunks = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise ValueError("the URL is too long")  # the parser stops, and the connection is closed below

    def on_header(self, name: bytes, value: bytes) -> None:
        self.scope["state"].setdefault(RAW_HEADERS, []).append((name, value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._chunks = False, 0, 0
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise ValueError("too many chunks")

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Triton closes on what is not HTTP, without a word."""
        self.transport.close()
