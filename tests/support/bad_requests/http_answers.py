"""Sends generated HTTP requests and returns what is compared of each answer."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable

from http_support import Connection, request_bytes

from bad_requests.http_cases import HttpCase

# status, content type and text; or what happened to the connection instead
Answer = tuple[str, str, str]

CLOSED: Answer = ("closed", "", "")
TIMEOUT: Answer = ("no answer", "", "")
_NUMBERS = re.compile(r'"(ns|count|last_inference|inference_count|execution_count)":\d+')
# folder of the machine in a path
_FOLDER = re.compile(r"(?<=At:\\n  )[^()]*/(?=\w+/\d+/model\.py)")


class HttpSender:
    """Sends requests over one connection, and over a new one where the server closes it."""

    def __init__(self, port: int, timeout: float = 20.0) -> None:
        self._port = port
        self._timeout = timeout
        self._connection: Connection | None = None

    def send(self, case: HttpCase) -> Answer:
        headers = [list(pair) for pair in case.headers]
        data = request_bytes(case.method, case.path, headers, case.body)
        if case.method == "HEAD" or self._connection is None:
            self.close()
            self._connection = Connection(self._port, self._timeout)
        answer = self._exchange(self._connection, data, case.method == "HEAD")
        if answer in (CLOSED, TIMEOUT) or case.method == "HEAD":
            self.close()
        return answer

    def _exchange(self, connection: Connection, data: bytes, head_only: bool) -> Answer:
        try:
            connection.send(data)
            answer = connection.answer(head_only)
        except TimeoutError:
            return TIMEOUT
        except (ConnectionError, AssertionError):
            return CLOSED
        if answer is None:
            return CLOSED
        body = answer.body
        encoding = answer.header("content-encoding")
        if encoding == "gzip":
            body = gzip.decompress(body)
        elif encoding == "deflate":
            body = zlib.decompress(body)
        return str(answer.status), answer.header("content-type") or "", masked(body)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.__exit__()
            self._connection = None


def masked(body: bytes) -> str:
    """Return the text of a body without counters and folders of the machine."""
    text = body.decode("utf-8", "backslashreplace")
    return _FOLDER.sub("", _NUMBERS.sub(r'"\1":0', text))


def send_all(port: int, cases: Iterable[HttpCase]) -> list[Answer]:
    sender = HttpSender(port)
    try:
        return [sender.send(case) for case in cases]
    finally:
        sender.close()
