"""Bad input gets the recorded status and text, and does not disturb concurrent streams."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from http_support import Connection, RunningServer, post, request_bytes
from tiny_text import EchoEngine, text_registry, write_engine_folder

from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.kserve.context import DEFAULT_HTTP_MAX_INPUT_BYTES as MAX_BODY_BYTES
from slipstream.server.kserve.health import ServerState
from slipstream.server.log.repeated import RepeatedWarning
from slipstream.server.services import create_app

GENERATE = "/v2/models/ensemble/generate"
CANARY = json.dumps({"text_input": "canary 🐤 ", "max_tokens": 150, "stream": True}).encode()
COUNTS = "expected number of inputs between 2 and 26 but got"
PARSING = "failed to parse the request JSON buffer: "
IN_ENSEMBLE = "in ensemble 'ensemble', "


class Bad(NamedTuple):
    what: str
    body: bytes
    status: int
    framing: str
    text: str
    path: str = GENERATE


def fields(**given: Any) -> bytes:
    return json.dumps({"text_input": "abc", "max_tokens": 4, **given}).encode()


def unparsed(what: str, body: bytes, text: str, path: str = GENERATE) -> Bad:
    return Bad(what, body, 500, "content-length", text, path)


def refused(what: str, body: bytes, text: str) -> Bad:
    """Return a case that the model refuses in its response."""
    return Bad(what, body, 400, "chunked", IN_ENSEMBLE + text)


TABLE = [
    unparsed("empty body", b"", PARSING + "The document is empty. at 0"),
    unparsed("not JSON", b"hello", PARSING + "Invalid value. at 0"),
    unparsed(
        "truncated JSON",
        b'{"text_input": "a"',
        PARSING + "Missing a comma or '}' after an object member. at 18",
    ),
    unparsed("an array", b"[]", "attempt to get members for non-object"),
    unparsed(
        "unpaired surrogate",
        rb'{"text_input":"\ud83d"}',
        PARSING + "The surrogate pair in string is invalid. at 15",
    ),
    unparsed(
        "deeply nested",
        b"[" * 200_000,
        PARSING + "More than 400 levels of arrays and objects. at 400",
    ),
    Bad(
        "missing field",
        b'{"text_input": "abc"}',
        400,
        "content-length",
        f"[request id: <id_unknown>] {COUNTS} 1 inputs for model 'ensemble'. Got input(s) ['text_input'], but missing "
        "required input(s) ['max_tokens']. Please provide all required input(s).",
    ),
    Bad(
        "no field",
        b'{"id": "r7"}',
        400,
        "content-length",
        f"[request id: r7] {COUNTS} 0 inputs for model 'ensemble'. Got input(s) [], but missing required input(s) "
        "['text_input' or 'messages','max_tokens']. Please provide all required input(s).",
    ),
    refused(
        "salt that is not UTF-8",
        b'{"text_input":"a","max_tokens":1,"cache_salt":"\xff"}',
        "cache_salt must be UTF-8 text",
    ),
    refused(
        "adapter that is not UTF-8",
        b'{"text_input":"a","max_tokens":1,"lora_name":"a\xff"}',
        "lora_name must be UTF-8 text",
    ),
    refused(
        "missing field hidden by an optional one",
        b'{"text_input": "abc", "top_k": 1}',
        "max_tokens is required",
    ),
    Bad(
        "field twice",
        b'{"text_input":"a","text_input":"b","max_tokens":1}',
        400,
        "content-length",
        "[request id: <id_unknown>] input 'text_input' already exists in request",
    ),
    Bad(
        "unknown field of a kind that cannot be",
        fields(flavour=["mint"]),
        400,
        "content-length",
        "parameter 'flavour' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    unparsed(
        "number as text",
        fields(max_tokens="4"),
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    unparsed(
        "text as number",
        fields(text_input=5),
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    ),
    unparsed(
        "float as integer",
        fields(max_tokens=2.5),
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    unparsed(
        "number as boolean",
        fields(stream=1),
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    ),
    unparsed(
        "negative seed",
        fields(random_seed=-1),
        "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    unparsed(
        "id that is not a string",
        fields(id=7),
        "Unable to parse 'id': attempt to access JSON non-string as string",
    ),
    Bad(
        "two values for one",
        fields(temperature=[0.5, 0.6]),
        400,
        "content-length",
        "[request id: <id_unknown>] input 'max_tokens' batch size does not match other inputs for 'ensemble'",
    ),
    Bad(
        "tensor that JSON cannot hold",
        fields(prompt_embedding_table=[1.0]),
        400,
        "content-length",
        "receiving FP16 data via JSON is not supported. "
        "Please use the binary data format for input prompt_embedding_table",
    ),
    refused("max_tokens 0", fields(max_tokens=0), "max_tokens must be > 0, got 0"),
    refused("max_tokens negative", fields(max_tokens=-1), "max_tokens must be > 0, got -1"),
    refused(
        "max_tokens beyond INT32, which wraps",
        fields(max_tokens=3_000_000_000),
        "max_tokens must be > 0, got -1294967296",
    ),
    refused(
        "NaN temperature",
        fields(temperature=float("nan")),
        "temperature must be a finite number, got nan",
    ),
    refused(
        "infinite temperature",
        fields(temperature=1e300),
        "temperature must be a finite number, got inf",
    ),
    refused("negative top_k", fields(top_k=-1), "top_k must be >= 0, got -1"),
    refused(
        "beams",
        fields(beam_width=2),
        "Requested beam width 2 is larger than configured max beam width 1",
    ),
    refused(
        "too many stop words",
        fields(stop_words=["x"] * 100),
        "stop_words must hold at most 64 words, got 100",
    ),
    refused(
        "prompt too long",
        fields(text_input="x" * 5000),
        "Prompt length (5000) exceeds maximum input length (4095).",
    ),
    refused(
        "prompt much too long",
        fields(text_input="x" * (2 << 20)),
        f"Prompt length (over 4095, text_input has {2 << 20} bytes) exceeds maximum input length (4095).",
    ),
    Bad(
        "unknown model",
        fields(),
        404,
        "content-length",
        "Request for unknown model: 'nope' is not found",
        "/v2/models/nope/generate",
    ),
    Bad(
        "unknown version",
        fields(),
        404,
        "content-length",
        "Request for unknown model: 'ensemble' version 9 is not found",
        "/v2/models/ensemble/versions/9/generate",
    ),
    Bad(
        "absurd version",
        fields(),
        400,
        "content-length",
        f"failed to get model version from specified version string '{'9' * 30}' (details: stol), "
        "version should be an integral value > 0",
        f"/v2/models/ensemble/versions/{'9' * 30}/generate",
    ),
]


class Stage(NamedTuple):
    port: int
    engine: EchoEngine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("bad")
    write_repository(folder / "repo", "llama", *[write_engine_folder(folder / "engine")] * 2, 64)
    engine = EchoEngine(delay=0.002)
    app = create_app(text_registry(read_repository(folder / "repo"), engine), ServerState([engine]))
    with RunningServer(app) as server:
        yield Stage(server.port, engine)


def canary(port: int) -> list[bytes]:
    answer = post(port, "/v2/models/llama/generate_stream", CANARY)
    assert answer.status == 200
    return answer.chunks


def check(port: int, bad: Bad) -> None:
    answer = post(port, bad.path, bad.body)
    assert json.loads(answer.body) == {"error": bad.text}, bad.what
    assert (answer.status, answer.framing) == (bad.status, bad.framing), bad.what
    assert answer.header("content-type") == "application/json", bad.what


def test_bad_input_gets_its_error_and_does_not_disturb_a_stream(stage: Stage) -> None:
    """A stream during all bad requests is the same as on an idle server."""
    quiet = canary(stage.port)
    disturbed: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: disturbed.append(canary(stage.port)))
    stage.engine.hold_end = True  # the stream does not end before the table does
    thread.start()
    try:
        for bad in TABLE:
            check(stage.port, bad)
    finally:
        stage.engine.hold_end = False
    thread.join()
    assert disturbed == [quiet]
    assert len(quiet) == 150


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.what)
def test_generate_stream_reports_the_same_errors(stage: Stage, bad: Bad) -> None:
    """Errors before a model runs are JSON; refusals of a model are events."""
    answer = post(stage.port, bad.path + "_stream", bad.body)
    assert (answer.status, answer.framing) == (bad.status, bad.framing)
    expected = (
        "application/json"
        if bad.framing == "content-length"
        else "text/event-stream; charset=utf-8"
    )
    assert answer.header("content-type") == expected
    body = answer.body.removeprefix(b"data: ") if bad.framing == "chunked" else answer.body
    assert json.loads(body) == {"error": bad.text}


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_refused_with_its_size(stage: Stage, chunked: bool) -> None:
    size = MAX_BODY_BYTES + 1
    piece = b" " * (1 << 20)
    head = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    with Connection(stage.port) as connection:
        connection.send(
            b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n"
        )
        for _ in range(64):
            connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        connection.send(b"1\r\n \r\n0\r\n\r\n" if chunked else b" ")
        answer = connection.answer()
        assert answer is not None
        text = (
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {MAX_BODY_BYTES} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
        assert (answer.status, json.loads(answer.body)) == (400, {"error": text})
        # the connection can still be used
        connection.send(request_bytes("POST", GENERATE, [], fields()))
        after = connection.answer()
        assert after is not None
        assert after.status == 200


def test_huge_body_of_a_client_that_expects_100_continue_is_refused(stage: Stage) -> None:
    with Connection(stage.port) as connection:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\nExpect: 100-continue\r\n\r\n"
        connection.send(head.encode())
        answer = connection.answer()
        assert answer is not None
        assert (answer.status, answer.interim) == (400, b"")
        assert f"request JSON size of {10**12} bytes".encode() in answer.body


def test_a_body_of_very_many_chunks_closes_the_connection(stage: Stage) -> None:
    with Connection(stage.port) as connection:
        head = (
            b"POST "
            + GENERATE.encode()
            + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            connection.send(head + b"1\r\n \r\n" * 200_000)
            assert connection.head() is None
        except (BrokenPipeError, ConnectionResetError):
            pass  # closed while we were still sending
    assert post(stage.port, GENERATE, fields()).status == 200


def test_a_timeout_of_any_size_is_a_timeout(stage: Stage) -> None:
    body = b'{"text_input":"a","max_tokens":1,"timeout":1' + b"0" * 400 + b"}"
    assert post(stage.port, GENERATE, body).status == 200


def test_many_malformed_requests_are_few_lines_of_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        with Connection(stage.port) as connection:
            connection.send(b"garbage\r\n\r\n")
            assert connection.is_closed(20)
    lines = [line for line in caplog.messages if "Invalid HTTP request" in line]
    assert len(lines) < 10


async def test_a_repeated_warning_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    warn = RepeatedWarning(logging.getLogger("test"), "it happened", 0.05)
    for _ in range(4):
        warn()
    async with asyncio.timeout(20):
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.01)
    assert caplog.messages == ["it happened", "it happened (3 more in 0.05 s)"]


def test_bad_requests_do_not_reach_the_engine(stage: Stage) -> None:
    before = len(stage.engine.submitted)
    for bad in TABLE:
        post(stage.port, bad.path, bad.body)
    assert len(stage.engine.submitted) == before
