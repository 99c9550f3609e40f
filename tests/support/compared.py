"""Requests that are sent to both servers, and their answers with varying values masked."""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_support import Answer, Connection, request_bytes

REQUESTS = Path(__file__).parents[1] / "conformance" / "live_requests.jsonl"
_NUMBERS = re.compile(rb'"(ns|count|last_inference|inference_count|execution_count)":\d+')
# folder of the machine in a path
_PLACE = re.compile(rb"(?<=At:\\n  )[^()]*/(?=\w+/\d+/model\.py)")


def requests() -> list[dict[str, Any]]:
    return [json.loads(line) for line in REQUESTS.read_text("utf-8").splitlines()]


@dataclass(frozen=True)
class ComparedAnswer:
    """The parts of an answer that are compared."""

    status: int  # 0: the connection was closed without an answer
    content_type: str | None = None
    framing: str = ""
    encoding: str | None = None
    chunks: int = 0
    body: bytes = b""


def _content(part: dict[str, Any]) -> bytes | None:
    if "body_b64" in part:
        return base64.b64decode(part["body_b64"])
    return part["body"].encode() if "body" in part else None


def request_of(request: dict[str, Any]) -> bytes:
    if "raw" in request:
        return _content(request["raw"]) or b""
    if "body_repeat" in request:
        before, piece, times, after = request["body_repeat"]
        body: bytes | None = (before + piece * times + after).encode()
    else:
        body = _content(request)
    if body is None and request["method"] == "POST":
        body = b""
    version = request.get("ver", "HTTP/1.1")
    host = request.get("auto", True)
    return request_bytes(
        request["method"], request["path"], request["headers"], body, version, host
    )


def ask(port: int, request: dict[str, Any]) -> ComparedAnswer:
    with Connection(port, timeout=60.0) as connection:
        connection.send(request_of(request))
        answer = connection.answer(head_only=request["method"] == "HEAD")
    return ComparedAnswer(0) if answer is None else _compared_answer(answer)


def _compared_answer(answer: Answer) -> ComparedAnswer:
    encoding = answer.header("content-encoding")
    body = answer.body
    if encoding == "gzip":
        body = gzip.decompress(body)
    elif encoding == "deflate":
        body = zlib.decompress(body)
    body = _PLACE.sub(b"", _NUMBERS.sub(rb'"\1":0', body))
    return ComparedAnswer(
        answer.status,
        answer.header("content-type"),
        answer.framing,
        encoding,
        len(answer.chunks),
        body,
    )
