"""The HTTP recordings, answered by the code of the recorded models."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from http_support import Answer, Connection, RunningServer, post, request_bytes
from python_model_harness import CONFORMANCE, MIMIC, models_of

from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.python_models.model import PythonModel
from slipstream.server.services import create_app

ROUTE = re.compile(r"/v2/models/(\w+)(?:/versions/\d+)?/(?:generate|generate_stream|infer)")
# Models of recordings that other tests cover: those about timing, and the ensemble.
ELSEWHERE = {"slow", "slow_nd", "llm_slow", "ens"}
# paths of the recording machine; this server's start at the repository
PATH = re.compile(rb"/models/repo-\w+/")


def recorded() -> list[dict[str, Any]]:
    lines = (CONFORMANCE / "golden" / "mimic.jsonl").read_text("utf-8").splitlines()
    return [case for case in map(json.loads, lines) if is_ours(case)]


def is_ours(case: dict[str, Any]) -> bool:
    request, response = case["request"], case["response"]
    route = ROUTE.fullmatch(request.get("path", ""))
    plain = (
        request.get("method") == "POST" and "raw" not in request and "body_repeat" not in request
    )
    kept = response.get("connection_after") == "kept open" and "n_chunks" not in response
    return bool(
        route
        and plain
        and kept
        and route.group(1) not in ELSEWHERE
        and case["group"] in ("generate", "stream", "infer")
    )


CASES = recorded()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    registry, factory, opened = ModelRegistry(), PythonModels(), []

    async def load() -> None:
        for name, model in models_of(MIMIC).items():
            if factory.claims(model) and name not in ELSEWHERE:
                for version in model.versions:
                    served = await factory.load(model, version, registry)
                    assert isinstance(served, PythonModel)
                    opened.append(served)
                    registry.add(name, version, served)

    async def close() -> None:
        await asyncio.gather(*(model.close() for model in opened))

    with RunningServer(create_app(registry, ServerState([]))) as server:
        assert server.loop is not None
        asyncio.run_coroutine_threadsafe(load(), server.loop).result(60)
        yield server.port
        asyncio.run_coroutine_threadsafe(close(), server.loop).result(60)


def test_there_are_recordings() -> None:
    assert len(CASES) > 60


def sent(port: int, request: dict[str, Any]) -> Answer:
    body = (
        base64.b64decode(request["body_b64"])
        if "body_b64" in request
        else request.get("body", "").encode()
    )
    with Connection(port) as connection:
        connection.send(request_bytes("POST", request["path"], request["headers"], body))
        answer = connection.answer()
        assert answer is not None
        return answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_recorded_answer(port: int, case: dict[str, Any]) -> None:
    expected, answer = case["response"], sent(port, case["request"])
    assert answer.status == expected["status"]
    assert answer.framing == expected["framing"]
    assert answer.header("content-type") == dict(expected["headers"])["Content-Type"]
    assert answer.body == PATH.sub(b"", recorded_body(expected))
    if answer.framing == "chunked":
        assert len(answer.chunks) == len(expected["chunks"])


@pytest.mark.parametrize(
    ("parameters", "status", "error"),
    [
        (
            {},
            400,
            "inference request to model 'seq' must specify a non-zero or non-empty correlation ID",
        ),
        (
            {"sequence_id": 81},
            400,
            "inference request for sequence 81 to model 'seq' must specify the START flag on "
            "the first request of the sequence",
        ),
        ({"sequence_id": 82, "sequence_start": True, "sequence_end": True}, 200, ""),
        ({"sequence_id": "83", "sequence_start": True, "sequence_end": True}, 200, ""),
    ],
)
def test_sequence_parameters_are_checked(
    port: int, parameters: dict[str, Any], status: int, error: str
) -> None:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    body = json.dumps({"parameters": parameters, "inputs": [tensor]})
    answer = sent(port, {"path": "/v2/models/seq/infer", "headers": [], "body": body})
    assert (answer.status, json.loads(answer.body).get("error", "")) == (status, error)


def recorded_body(response: dict[str, Any]) -> bytes:
    return (
        base64.b64decode(response["body_b64"])
        if "body_b64" in response
        else response.get("body", "").encode()
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"text_input": "a", "id": "\xff"}',
        b'{"text_input": "a", "parameters": {"\xff": "\x80"}}',
        b'{"text_input": "a", "id": "\\udc00"}',
    ],
)
def test_text_that_is_not_utf8_does_not_stop_a_model(port: int, body: bytes) -> None:
    """A model has one slot for a request. One that could not be sent must not keep it."""
    for _ in range(5):
        answer = post(port, "/v2/models/oops_nd/generate", body)
        assert (
            answer.status,
            json.loads(answer.body.decode("utf-8", "replace"))["text_output"],
        ) == (
            200,
            "a",
        )


def test_model_sees_replacement_characters_for_bytes_that_are_not_utf8(port: int) -> None:
    body = b'{"text_input": "reqinfo", "id": "a\xffb"}'
    answer = post(port, "/v2/models/oops_nd/generate", body)
    assert b'"id":"a\xffb"' in answer.body
    text = json.loads(answer.body.decode("utf-8", "replace"))["text_output"]
    assert json.loads(text)["id"] == "a\N{REPLACEMENT CHARACTER}b"
