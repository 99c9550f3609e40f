"""Recorded HTTP answers of a real Triton to infer, statistics, settings and shared memory."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from grpc_support import recorded_registry
from http_support import RunningServer
from recordings import http_cases, recorded_bytes
from test_conformance_http import PHRASES, send

from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.repository_control import NoControl
from slipstream.server.kserve.shared_memory import PLACE, SharedMemory
from slipstream.server.log.output import HANDLER
from slipstream.server.services import create_app, create_context

CASES = http_cases()

# Deliberate differences and their reasons. A test still sends these requests and checks the answer.
DIFFERENT = {
    "infer-err-model-raise": "the recorded text is a Python traceback; the models here are not Python models",
    "compress-infer-req-bad": "a body that cannot be decompressed is refused; Triton reads it as a raw tensor",
}
# Requests that change settings, in the order of the recording.
LOGGING = [
    "get",
    "post",
    "get-after",
    "post-badtype",
    "post-badjson",
    "post-restore",
    "post-unknown",
    "put",
]
TRACE = [
    "get",
    "post",
    "post-unknown",
    "post-badlevel",
    "post-bad",
    "get-model",
    "post-model",
    "post-model-clear",
    "post-restore",
    "get",
]
SHARED_MEMORY = [
    "sys-status",
    "sys-status-unknown",
    "register",
    "register-dup",
    "register-out",
    "register-missing",
    "register-nokey",
    "register-triton",
    "register-get",
    "sys-status-2",
    "sys-status-in",
    "infer",
    "infer-wrong-size",
    "infer-unknown-region",
    "infer-out-of-range",
    "unregister",
    "unregister-unknown",
    "unregister-all",
    "cuda-status",
    "cuda-register",
    "cuda-unregister-all",
]
# Triton compressed these bodies with another build of zlib. The decompressed bodies are compared.
COMPRESSED = {"gzip": 31, "deflate": 15}


@pytest.fixture(scope="module")
def registry() -> ModelRegistry:
    return recorded_registry()[0]


@pytest.fixture(scope="module")
def port(registry: ModelRegistry) -> Iterator[int]:
    shared = create_context(
        control=NoControl(registry), memory=SharedMemory(allowed=True), server_name="oracle-mimic"
    )
    with RunningServer(create_app(registry, ServerState([]), shared)) as server:
        yield server.port


def check(port: int, case: dict[str, Any]) -> None:
    expected = case["response"]
    answer = send(port, case)
    assert answer is not None
    headers = {name.lower(): value for name, value in expected["headers"]}
    assert answer.status == expected["status"], answer.body
    assert answer.reason == PHRASES.get(answer.status, expected["reason"])
    assert answer.framing == expected["framing"]
    assert answer.header("content-type") == headers["content-type"]
    # every 503 of this server has retry-after
    names = [name for name, _ in answer.headers if name != "retry-after"]
    assert sorted(names) == sorted(headers)
    if "content-encoding" in headers:
        assert answer.header("content-encoding") == headers["content-encoding"]
        window = COMPRESSED[headers["content-encoding"]]
        assert zlib.decompress(answer.body, window) == zlib.decompress(
            recorded_bytes(expected), window
        )
        return
    assert answer.body == recorded_bytes(expected)
    assert answer.header("inference-header-content-length") == headers.get(
        "inference-header-content-length"
    )


PLAIN = [
    case
    for name, case in CASES.items()
    if case["group"] in ("infer", "compress", "route", "repo", "meta") and name not in DIFFERENT
]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["case"])
def test_recorded_request_is_answered_alike(port: int, case: dict[str, Any]) -> None:
    check(port, case)


@pytest.mark.parametrize("name", DIFFERENT)
def test_deliberate_differences_are_as_listed(port: int, name: str) -> None:
    answer = send(port, CASES[name])
    assert answer is not None
    if name == "infer-err-model-raise":
        assert answer.status == 200  # this model ignores the command and responds
    else:
        assert answer.status == CASES[name]["response"]["status"]
        assert json.loads(answer.body)["error"].startswith("the request's body is not gzip data")


STATISTICS = ["stats-badversion", "stats-unknown", "stats-post"]


@pytest.mark.parametrize("name", STATISTICS)
def test_refused_statistics_are_answered_alike(port: int, name: str) -> None:
    check(port, CASES[name])


@pytest.mark.parametrize(
    "name", ["stats-all-before", "stats-model-before", "stats-model-after", "stats-ensemble"]
)
def test_statistics_have_tritons_shape(port: int, name: str) -> None:
    """The counts depend on what ran before; the keys and their order do not."""
    answer = send(port, CASES[name])
    assert answer is not None
    ours = json.loads(answer.body)
    theirs = json.loads(CASES[name]["response"]["body"])
    if name == "stats-all-before":
        names = {model["name"] for model in theirs["model_stats"]}
        assert {model["name"] for model in ours["model_stats"]} >= names - {"raw1"}
    mine = ours["model_stats"][0]
    recorded_one = theirs["model_stats"][0]
    assert list(mine) == list(recorded_one)
    assert list(mine["inference_stats"]) == list(recorded_one["inference_stats"])
    assert (mine["name"], mine["version"]) == (recorded_one["name"], recorded_one["version"])


def test_log_settings_are_answered_alike(port: int) -> None:
    for name in LOGGING:
        check(port, CASES[f"logging-{name}"])
    assert HANDLER.settings.info  # restored by the last request


def test_trace_settings_are_answered_alike(port: int) -> None:
    for name in TRACE:
        check(port, CASES[f"trace-{name}"])
    check(port, CASES["trace-version"])


def test_system_shared_memory_holds_inputs_and_outputs(port: int) -> None:
    """Inputs are read from the client's shared memory, and an output is written to it."""
    files = {name: PLACE / f"oracle_shm_{name}" for name in ("in", "out")}
    numbers = [*range(16), *([1] * 16)]
    try:
        files["in"].write_bytes(b"".join(number.to_bytes(4, "little") for number in numbers))
        files["out"].write_bytes(bytes(128))
        for name in SHARED_MEMORY:
            check(port, CASES[f"shm-{name}"])
        written = files["out"].read_bytes()
        sums = [int.from_bytes(written[place : place + 4], "little") for place in range(0, 64, 4)]
        assert sums == list(range(1, 17))
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)


def test_every_recorded_case_is_tested() -> None:
    tested = {case["case"] for case in PLAIN} | set(DIFFERENT) | set(STATISTICS)
    tested |= (
        {f"logging-{name}" for name in LOGGING}
        | {f"trace-{name}" for name in TRACE}
        | {"trace-version"}
    )
    tested |= {f"shm-{name}" for name in SHARED_MEMORY}
    tested |= {
        "stats-all-before",
        "stats-all-after",
        "stats-model-before",
        "stats-model-after",
        "stats-ensemble",
    }
    # tested in test_conformance_control.py
    elsewhere = {name for name, case in CASES.items() if case["server"] != "mimic"}
    assert tested | elsewhere == set(CASES)
