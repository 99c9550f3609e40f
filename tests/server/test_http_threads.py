"""Long JSON bodies are parsed outside the thread of the event loop, short ones in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from grpc_support import recorded_registry
from http_support import RunningServer, post

from slipstream.server.http import generate, infer_request
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.triton_json import parse_json
from slipstream.server.openai import completions
from slipstream.server.openai.fields import read_fields
from slipstream.server.services import create_app
from slipstream.server.text.threads import THREAD_ABOVE_SIZE


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    app = create_app(recorded_registry()[0], ServerState([]))
    with RunningServer(app) as server:
        yield server


def generate_body(text: str) -> dict[str, Any]:
    return {"text_input": text}


def infer_body(text: str) -> dict[str, Any]:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}
    return {"inputs": [tensor]}


def completion_body(text: str) -> dict[str, Any]:
    return {"model": "none of these", "prompt": text}


CALLS = {
    "generate": (
        "/v2/models/echo/generate",
        generate_body,
        generate,
        "parse_json",
        parse_json,
        200,
    ),
    "infer": ("/v2/models/echo/infer", infer_body, infer_request, "parse_json", parse_json, 200),
    "completions": (
        "/v1/completions",
        completion_body,
        completions,
        "read_fields",
        read_fields,
        404,
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("extra", "in_thread"), [(0, False), (1, True)], ids=["short", "long"])
def test_only_long_bodies_are_parsed_in_a_thread(
    server: RunningServer,
    call: tuple[Any, ...],
    extra: int,
    in_thread: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, body_of, module, name, parse, status = call
    threads: list[int] = []

    def record_thread(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*args)

    monkeypatch.setattr(module, name, record_thread)
    empty = len(json.dumps(body_of("")))
    body = json.dumps(body_of("x" * (THREAD_ABOVE_SIZE - empty + extra))).encode()
    assert len(body) == THREAD_ABOVE_SIZE + extra
    answer = post(server.port, path, body)
    assert answer.status == status
    assert [thread != server.thread_id for thread in threads] == [in_thread]
