"""Recorded requests to a real Triton get the same status, content type, framing, chunks and body.

There are two recordings. `mimic` has small models and is compared byte by byte. `trtllm` has the
v0.10 text model repository around a stand-in engine; its texts differ, so their form is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_support import Answer, Connection, RunningServer, request_bytes, wait_until
from recorded_models import RECORDED
from recordings import recorded_bytes
from tiny_text import EchoEngine, text_registry, write_engine_folder, write_recorded_repository

from slipstream.repository.models import read_repository
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.models.build import build_registry
from slipstream.server.services import create_app, create_context

HERE = Path(__file__).parent


def recorded(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (HERE / "golden" / f"{name}.jsonl").read_text("utf-8").splitlines()
    ]


# Deliberate differences and their reasons. A test still sends these requests and checks the answer.
DIFFERENT = {
    "generate-oops-raise": "the recorded text is a Python traceback; the models here are not Python models",
    "cancel-http-generate": "Triton does not notice the disconnect; here the request is cancelled at once",
    "health-live-head": "Triton sends a body after HEAD, which breaks the next answer; here HEAD has none",
    "route-method-generate-head": "Triton sends a body after HEAD, which breaks the next answer; here HEAD has none",
    "route-bogus-method": "the HTTP parser refuses the method FOO and closes the connection, instead of 405",
    "route-404-openai": "OpenAI's routes are served here, and this one accepts only POST",
    "route-no-host": "a request of HTTP/1.1 without a Host is 400, as RFC 9112 demands",
    "route-http10": "the answer has Content-Length: 0, which Triton omits for HTTP/1.0",
    "route-http10-keepalive": "HTTP/1.0 connections are closed after the answer, even with keep-alive",
    "route-http10-generate": "the connection is closed by a header too (Connection: close)",
    "route-conn-close": "the connection is closed by a header too (Connection: close)",
    "route-conn-close-generate": "the connection is closed by a header too (Connection: close)",
}
# Triton sends "405 Not Allowed"; this server sends the registered phrase.
PHRASES = {405: "Method Not Allowed"}
EXTRA_HEADERS = {"connection"}


@pytest.fixture(scope="module")
def mimic_registry() -> ModelRegistry:
    repository = read_repository(HERE / "repos" / "mimic", served_elsewhere=RECORDED)
    return build_registry(repository, {}, RECORDED)


@pytest.fixture(scope="module")
def mimic(mimic_registry: ModelRegistry) -> Iterator[int]:
    app = create_app(mimic_registry, ServerState([]), create_context(server_name="oracle-mimic"))
    with RunningServer(app) as server:
        yield server.port


@pytest.fixture(scope="module")
def trtllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("trtllm")
    engine = write_engine_folder(folder / "engine")
    write_recorded_repository(folder / "repo", engine)
    echo = EchoEngine()
    registry = text_registry(read_repository(folder / "repo"), echo)
    with RunningServer(create_app(registry, ServerState([echo]))) as server:
        yield server.port


def request_of(case: dict[str, Any]) -> bytes:
    request = case["request"]
    if "raw" in request:
        return recorded_bytes(request["raw"])
    if "body_repeat" in request:
        before, piece, times, after = request["body_repeat"]
        body: bytes | None = (before + piece * times + after).encode()
    else:
        body = recorded_bytes(request) if "body" in request or "body_b64" in request else None
    if body is None and request["method"] == "POST":
        body = b""
    version = request.get("ver", "HTTP/1.0" if "http10" in case["case"] else "HTTP/1.1")
    host = request.get("auto", True)
    return request_bytes(
        request["method"], request["path"], request["headers"], body, version, host
    )


def send(port: int, case: dict[str, Any]) -> Answer | None:
    head_only = case["request"]["method"] == "HEAD"
    with Connection(port) as connection:
        connection.send(request_of(case))
        answer = connection.answer(head_only)
        if answer is not None and case["response"].get("connection_after") == "closed by server":
            answer.closed = connection.is_closed(5.0)
        return answer


PLAIN = [
    case
    for case in recorded("mimic")
    if case["response"]
    and case["case"] not in DIFFERENT
    and not case["response"].get("closed_without_response")
    and not case["response"].get("timeout")
    and case["case"] != "cancel-http-stream"
]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["case"])
def test_recorded_request_is_answered_alike(mimic: int, case: dict[str, Any]) -> None:
    expected = case["response"]
    answer = send(mimic, case)
    assert answer is not None
    assert answer.status == expected["status"]
    assert answer.reason == PHRASES.get(answer.status, expected["reason"])
    assert answer.framing == expected["framing"]
    assert answer.header("content-type") == dict(expected["headers"])["Content-Type"]
    assert sorted(name for name, _ in answer.headers) == sorted(
        name.lower() for name, _ in expected["headers"]
    )
    assert answer.interim == expected.get("interim", "").encode()
    if "n_chunks" in expected or "body_len" in expected:  # recorded in part
        assert (len(answer.body), len(answer.chunks)) == (
            expected["body_len"],
            expected["n_chunks"],
        )
        assert answer.body.startswith(expected["body"][:100].encode())
        return
    assert answer.body == recorded_bytes(expected)
    if answer.framing == "chunked":
        assert answer.chunks == [recorded_bytes(chunk) for chunk in expected["chunks"]]


CLOSED = [
    case
    for case in recorded("mimic")
    if case["response"] and case["response"].get("closed_without_response")
]


@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case["case"])
def test_recorded_close_is_repeated_without_a_response(mimic: int, case: dict[str, Any]) -> None:
    """A request that is not HTTP, or is too large, closes the connection without an answer."""
    with Connection(mimic) as connection:
        connection.send(request_of(case))
        assert connection.head() is None


def test_incomplete_body_gets_no_answer(mimic: int) -> None:
    case = next(case for case in recorded("mimic") if case["case"] == "route-short-body")
    with Connection(mimic) as connection:
        connection.send(request_of(case))
        assert not connection.is_closed(0.2)


DIFFERING = [case for case in recorded("mimic") if case["case"] in DIFFERENT and case["response"]]


@pytest.mark.parametrize("case", DIFFERING, ids=lambda case: case["case"])
def test_deliberate_differences_are_as_listed(mimic: int, case: dict[str, Any]) -> None:
    """Only the listed difference is accepted; the status is as recorded if there is one."""
    name = case["case"]
    expected = case["response"]
    answer = send(mimic, case)
    if name == "route-bogus-method":
        assert answer is None
        return
    assert answer is not None
    if name == "generate-oops-raise":
        assert answer.status == 200  # this model ignores the command and responds
        return
    if name == "route-404-openai":
        assert (answer.status, json.loads(answer.body)["error"]["type"]) == (
            405,
            "invalid_request_error",
        )
        return
    if name == "route-no-host":
        assert (answer.status, answer.body) == (400, b'{"error":"the request has no Host header"}')
        return
    assert answer.status == expected["status"]
    assert answer.header("content-type") == dict(expected["headers"])["Content-Type"]
    if "http10" in name or "conn-close" in name:
        assert answer.header("connection") == "close"
        assert answer.body == recorded_bytes(expected)


def test_disconnected_client_cancels_a_stream(mimic: int, mimic_registry: ModelRegistry) -> None:
    case = next(case for case in recorded("mimic") if case["case"] == "cancel-http-stream")
    slow: Any = mimic_registry.find("slow").model
    with Connection(mimic) as connection:
        connection.send(request_of(case))
        answer = connection.head()
        assert answer is not None
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        for chunk in case["response"]["chunks"]:
            assert connection.chunk() == recorded_bytes(chunk)
        assert slow.cancelled == []
    wait_until(lambda: slow.cancelled == ["cancel-http"])


def test_disconnected_client_cancels_a_single_answer(
    mimic: int, mimic_registry: ModelRegistry
) -> None:
    slow: Any = mimic_registry.find("slow_nd").model
    with Connection(mimic) as connection:
        connection.send(
            request_bytes(
                "POST", "/v2/models/slow_nd/generate", [], b'{"text_input":"60000","id":"gone"}'
            )
        )
        assert not connection.is_closed(0.1)
    wait_until(lambda: slow.cancelled == ["gone"])


# -- the text model repository

OWN_TEXTS = {  # cases in which the recording has a text of its stand-in or a traceback
    "maxtokens0": "max_tokens must be > 0, got 0",
    "toolong": "Prompt length (25000) exceeds maximum input length (4095).",
    "bias-mismatch": (
        "embedding_bias_words must have same dimension as embedding_bias_weights, got 2 words and 1 weights"
    ),
}
LLM = [case for case in recorded("trtllm") if case["request"]["method"] == "POST"]


@pytest.mark.parametrize("case", LLM, ids=lambda case: case["case"])
def test_recorded_language_model_request_is_answered_alike(
    trtllm: int, case: dict[str, Any]
) -> None:
    expected = case["response"]
    answer = send(trtllm, case)
    assert answer is not None
    assert answer.status == expected["status"]
    assert answer.framing == expected["framing"]
    assert answer.header("content-type") == dict(expected["headers"])["Content-Type"]
    ours = events(answer.body)
    theirs = events(recorded_bytes(expected))
    for mine, recorded_one in zip(ours, theirs, strict=True):
        assert list(mine) == list(recorded_one)  # the same keys, in the same order
        if "error" in mine:
            assert mine["error"] == expected_error(case["case"], recorded_one["error"])
        for key in set(mine) - {
            "text_output",
            "error",
            "INPUT_ID",
            "output_ids",
            "sequence_length",
        }:
            if key in ("REQUEST_INPUT_LEN", "OUT_END_ID", "OUT_PAD_ID"):
                assert type(mine[key]) is int  # the recording used another tokenizer
            else:
                assert mine[key] == recorded_one[key], key


def expected_error(name: str, recorded_text: str) -> str:
    own = next((text for part, text in OWN_TEXTS.items() if part in name), None)
    if own is None:
        return recorded_text
    prefix = "in ensemble 'ensemble', "
    return prefix + own if recorded_text.startswith(prefix) else own


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of an answer, streamed or not."""
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return [json.loads(part) for part in parts]


def test_engine_model_repeats_the_ids_it_was_given(trtllm: int) -> None:
    """The stand-in of the recording repeats the prompt, and so does ours: the ids are comparable."""
    for name in ("trtllm-llm-generate", "trtllm-llm-generate-stream"):
        case = next(case for case in recorded("trtllm") if case["case"] == name)
        answer = send(trtllm, case)
        assert answer is not None
        assert answer.chunks == [recorded_bytes(chunk) for chunk in case["response"]["chunks"]]


DESCRIBED = [case for case in recorded("trtllm") if case["request"]["method"] == "GET"]


@pytest.mark.parametrize("case", DESCRIBED, ids=lambda case: case["case"])
def test_recorded_model_metadata_is_answered_alike(trtllm: int, case: dict[str, Any]) -> None:
    expected = case["response"]
    answer = send(trtllm, case)
    assert answer is not None
    assert (answer.status, answer.framing) == (expected["status"], expected["framing"])
    assert answer.header("content-type") == "application/json"
    ours = json.loads(answer.body)
    theirs = json.loads(recorded_bytes(expected))
    assert list(ours) == list(theirs)
    if case["case"] == "trtllm-tensorrt_llm-meta":
        theirs["platform"] = "tensorrtllm"  # the recording's stand-in was a Python model
    if "parameters" in theirs:
        assert ours["parameters"].keys() >= theirs["parameters"].keys()
        ours.pop("parameters")
        theirs.pop("parameters")
    if "postprocessing" in case["case"] or "preprocessing" in case["case"]:
        ours.pop("model_transaction_policy", None)
    assert ours == theirs
