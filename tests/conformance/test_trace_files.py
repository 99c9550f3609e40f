"""Trace files: which requests are traced, into which file, and with the names of the real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_support import Client, RunningGrpc, message, recorded_registry
from http_support import RunningServer, get, post

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.services import create_app, create_context
from slipstream.server.tracing.settings import TraceSettings

COMPUTE = {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}
REQUEST = {"REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"}
HTTP = {"HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"}
GRPC = {"GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"}


def settings(
    file: Path, *levels: str, rate: int = 1, count: int = -1, frequency: int = 0
) -> TraceSettings:
    return TraceSettings(
        {
            "trace_file": str(file),
            "trace_level": list(levels),
            "trace_rate": str(rate),
            "trace_count": str(count),
            "log_frequency": str(frequency),
        }
    )


@contextmanager
def serving(trace: TraceSettings) -> Iterator[int]:
    app = create_app(recorded_registry()[0], ServerState([]), create_context(trace=trace))
    with RunningServer(app) as server:
        yield server.port


def infer(port: int, request_id: str, text: str = "z", model: str = "echo") -> int:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}
    body = {"id": request_id, "inputs": [tensor]}
    return post(port, f"/v2/models/{model}/infer", json.dumps(body).encode()).status


def change(port: int, wanted: dict[str, Any], model: str = "") -> Any:
    path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
    return json.loads(post(port, path, json.dumps(wanted).encode()).body)


def activities(file: Path) -> list[dict[str, Any]]:
    """Return the content of a file. The last request may be written after its response was read."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return json.loads(file.read_bytes())
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.01)
    raise AssertionError(f"{file.name} was never written whole")


def timestamps(found: list[dict[str, Any]], trace_id: int) -> dict[str, int]:
    return {
        stamp["name"]: stamp["ns"]
        for one in found
        if one["id"] == trace_id
        for stamp in one.get("timestamps", [])
    }


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [one.get("request_id", "") for one in found if "model_name" in one]


def test_an_http_request_is_traced_with_the_events_of_the_real_server(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "trace.json", "TIMESTAMPS", "TENSORS", frequency=1)) as port:
        assert infer(port, "my-id", 'he"llo') == 200
        found = activities(tmp_path / "trace.json.0")
    assert {"id": 1, "model_name": "echo", "model_version": 1, "request_id": "my-id"} in found
    tensors = [(one["activity"], one["tensor"]) for one in found if "tensor" in one]
    described = {"data": '"he"llo"', "shape": "1", "dtype": "BYTES"}
    assert tensors == [
        ("TENSOR_QUEUE_INPUT", {"name": "text_input", **described}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "text_output", **described}),
    ]
    times = timestamps(found, 1)
    assert set(times) == HTTP | REQUEST | COMPUTE
    order = [
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    ]
    assert [times[name] for name in order] == sorted(times[name] for name in order)


def test_levels_select_timestamps_and_tensors(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "times", "TIMESTAMPS", frequency=1)) as port:
        infer(port, "a")
        assert not [one for one in activities(tmp_path / "times.0") if "tensor" in one]
    with serving(settings(tmp_path / "tensors", "TENSORS", frequency=1)) as port:
        infer(port, "a")
        found = activities(tmp_path / "tensors.0")
    assert [one["activity"] for one in found if "activity" in one] == [
        "TENSOR_QUEUE_INPUT",
        "TENSOR_BACKEND_OUTPUT",
    ]
    assert not [one for one in found if "timestamps" in one]


def test_rate_selects_requests_and_log_frequency_splits_files(tmp_path: Path) -> None:
    """Trace every second request, write files of three traces, and the rest at the end."""
    trace = settings(tmp_path / "trace.json", "TIMESTAMPS", rate=2, frequency=3)
    with serving(trace) as port:
        for number in range(9):
            infer(port, f"n{number}")
        assert ids(activities(tmp_path / "trace.json.0")) == ["n1", "n3", "n5"]
    trace.close()
    assert ids(activities(tmp_path / "trace.json.1")) == ["n7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json.0", "trace.json.1"]


def read_in_one_call(path: Path) -> str:
    """Return the content of a file in one read: `read_text` reads twice and could mix two states."""
    with path.open("rb", buffering=0) as file:
        return (file.read(1 << 20) or b"").decode()


def test_without_a_frequency_one_file_holds_all_traces_and_is_always_valid(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("left by an earlier server")
    with serving(settings(tmp_path / "trace.json", "TIMESTAMPS")) as port:
        for count in (1, 2, 3):
            infer(port, f"n{count}")
            deadline = time.monotonic() + 10
            while (text := read_in_one_call(tmp_path / "trace.json")).count("request_id") != count:
                assert time.monotonic() < deadline
            assert ids(json.loads(text)) == [f"n{number}" for number in range(1, count + 1)]


def test_trace_count_decreases_and_is_shown(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "trace.json", "TIMESTAMPS", count=2)) as port:
        for number in range(4):
            infer(port, f"m{number}")
        assert ids(activities(tmp_path / "trace.json.0")) == ["m0", "m1"]
        assert json.loads(get(port, "/v2/trace/setting").body)["trace_count"] == "0"
        refused = change(port, {"trace_level": ["TIMESTAMPS"]}, "echo")
        assert refused == {"error": "Attempting to set invalid trace setting :"}
        assert change(port, {"trace_count": "1"})["trace_count"] == "1"
        infer(port, "again")
        assert ids(activities(tmp_path / "trace.json.1")) == ["again"]


def test_one_model_is_traced_and_switched_off_again(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "trace.json", "OFF", frequency=1)) as port:
        infer(port, "off")
        shown = change(port, {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, "echo")
        assert (shown["trace_level"], shown["trace_file"]) == (
            ["TIMESTAMPS"],
            str(tmp_path / "trace.json"),
        )
        infer(port, "other", "hello", model="oops_nd")
        infer(port, "on")
        assert ids(activities(tmp_path / "trace.json.0")) == ["on"]
        change(port, {"trace_level": ["OFF"]}, "echo")
        infer(port, "off again")
        assert change(port, {"trace_rate": "0", "trace_level": ["TIMESTAMPS"]}) == {
            "error": "Attempting to set invalid trace setting :sample rate must be non-zero"
        }
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.0"]


def test_errors_and_streams_are_traced(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "trace.json", "TIMESTAMPS", "TENSORS", frequency=1)) as port:
        assert infer(port, "o", "error", model="oops_nd") == 500
        failed = activities(tmp_path / "trace.json.0")
        body = {"text_input": "a b", "max_tokens": 2, "stream": True}
        post(port, "/v2/models/llm/generate_stream", json.dumps(body).encode())
        streamed = activities(tmp_path / "trace.json.1")
    assert set(timestamps(failed, 1)) == HTTP | REQUEST | COMPUTE
    texts = [
        one["tensor"]["data"] for one in streamed if one.get("activity") == "TENSOR_BACKEND_OUTPUT"
    ]
    assert [text for text in texts if text.startswith('"')] == ['"a"', '" b"']
    answers = [
        one
        for one in streamed
        if one.get("timestamps", [{}])[0].get("name") == "INFER_RESPONSE_COMPLETE"
    ]
    assert len(answers) == 2


def test_steps_of_an_ensemble_are_child_traces(tmp_path: Path) -> None:
    with serving(settings(tmp_path / "trace.json", "TIMESTAMPS", frequency=1)) as port:
        post(port, "/v2/models/ens/generate", b'{"text_input": "a b"}')
        found = activities(tmp_path / "trace.json.0")
    models = {
        one["model_name"]: (one["id"], one.get("parent_id")) for one in found if "model_name" in one
    }
    assert models == {"ens": (1, None), "echo": (2, 1), "oops": (3, 1)}
    assert set(timestamps(found, 1)) >= HTTP | REQUEST
    assert not set(timestamps(found, 1)) & COMPUTE
    assert set(timestamps(found, 2)) == REQUEST | COMPUTE


def test_grpc_calls_and_streams_are_traced(tmp_path: Path) -> None:
    document = {
        "model_name": "echo",
        "id": "g",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
        "raw_input_contents": ["BAAAAGdycGM="],
    }
    shared = create_context(trace=settings(tmp_path / "trace.json", "TIMESTAMPS", frequency=1))
    with (
        RunningGrpc(recorded_registry()[0], ServerState([]), shared) as server,
        Client(server.port) as client,
    ):
        client.unary("ModelInfer", message("ModelInfer", document))
        assert set(timestamps(activities(tmp_path / "trace.json.0"), 1)) == GRPC | REQUEST | COMPUTE
        assert len(list(client.stream(iter([message("ModelInfer", document)])))) == 1
        found = activities(tmp_path / "trace.json.1")
    assert ids(found) == ["g"]
    assert set(timestamps(found, 2)) == GRPC | REQUEST | COMPUTE


def test_requests_succeed_when_the_trace_file_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(settings(tmp_path / "missing" / "trace.json", "TIMESTAMPS", frequency=1)) as port:
        assert infer(port, "a") == 200
        assert infer(port, "b") == 200
    captured = capfd.readouterr()
    assert "cannot write the trace file" in captured.err + captured.out


def test_tracing_without_a_file_name_is_refused() -> None:
    with pytest.raises(InferenceError, match="trace file name is not given"):
        TraceSettings({"trace_level": ["TIMESTAMPS"]})
