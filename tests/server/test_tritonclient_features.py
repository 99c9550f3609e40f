"""Features of tritonclient besides inference, over HTTP and gRPC, against `tritonserver`.

The server has a real engine. The features are shared memory, classification, keys, settings,
statistics, repository control, priorities and timeouts.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.auth as grpc_auth
import tritonclient.http as http_client
import tritonclient.http.auth as http_auth
import tritonclient.utils.shared_memory as shared_memory
from test_http_tritonclient import make_repository
from tiny_server import ROOT, wait_for
from tritonclient.utils import InferenceServerException

KEY = "sesame"


@dataclass(frozen=True)
class Places:
    http: str
    grpc: str
    trace_file: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("features")
    flags = [
        "--http-port=0",
        "--grpc-port=0",
        "--metrics-port=0",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--model-control-mode=explicit",
        "--load-model=ensemble",
        "--allow-client-shm=true",
        f"--trace-config=triton,file={folder / 'trace.json'}",
        "--trace-config=triton,log-frequency=1",
    ]
    log = folder / "log.txt"
    repository = make_repository(folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SLIPSTREAM_API_KEY": KEY}
    command = [
        sys.executable,
        "-m",
        "slipstream.cli.compat.tritonserver",
        f"--model-repository={repository}",
        *flags,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: "Started Metrics" in log.read_text() or process.poll() is not None, 90)
        assert process.poll() is None, log.read_text()
        found = {name: _place(log, name) for name in ("HTTPService", "GRPCInferenceService")}
        yield Places(found["HTTPService"], found["GRPCInferenceService"], folder / "trace.json")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()


def _place(log: Path, service: str) -> str:
    line = next(line for line in log.read_text().splitlines() if f"Started {service}" in line)
    return line.rpartition(" ")[2]


class Http:
    """tritonclient over HTTP, with the key in a plug-in and the same methods as `Grpc`."""

    module: Any = http_client

    def __init__(self, places: Places) -> None:
        self.client = http_client.InferenceServerClient(places.http)
        self.client.register_plugin(_Bearer())

    def json(self, answer: Any) -> Any:
        return answer


class _Bearer(http_auth.BasicAuth):
    """Sends the key in the header that the client's plug-in uses for user and password."""

    def __init__(self) -> None:
        super().__init__("user", "password")
        self._auth_string = f"Bearer {KEY}"


class _GrpcBearer(grpc_auth.BasicAuth):
    def __init__(self) -> None:
        super().__init__("user", "password")
        self._auth_string = f"Bearer {KEY}"


class Grpc:
    module: Any = grpc_client

    def __init__(self, places: Places) -> None:
        self.client = grpc_client.InferenceServerClient(places.grpc)
        self.client.register_plugin(_GrpcBearer())

    def json(self, answer: Any) -> Any:
        from google.protobuf import json_format

        return json_format.MessageToDict(answer, preserving_proto_field_name=True)


@pytest.fixture(params=[Http, Grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest, places: Places) -> Iterator[Any]:
    made = request.param(places)
    yield made
    made.client.close()


IDS = np.array([[5, 6, 7]], np.int32)


def inputs(module: Any, tokens: int = 4) -> list[Any]:
    made = []
    arrays = {
        "input_ids": IDS,
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[tokens]], np.int32),
    }
    for name, array in arrays.items():
        made.append(module.InferInput(name, array.shape, "INT32"))
        made[-1].set_data_from_numpy(array)
    return made


def expected(triton: Any, tokens: int = 4) -> list[int]:
    return (
        triton.client.infer("tensorrt_llm", inputs(triton.module, tokens))
        .as_numpy("output_ids")
        .ravel()
        .tolist()
    )


def test_calls_without_the_key_are_refused(places: Places) -> None:
    with (
        http_client.InferenceServerClient(places.http) as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        client.get_server_metadata()
    assert "needs an API key" in str(raised.value)
    with (
        grpc_client.InferenceServerClient(places.grpc) as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        client.get_server_metadata()
    assert "StatusCode.UNAUTHENTICATED" in str(raised.value)


def test_inputs_and_outputs_in_shared_memory(triton: Any) -> None:
    """Token ids are read from one region, and those of the answer are written to another."""
    name = f"slipstream_test_{os.getpid()}_{triton.module.__name__.rpartition('.')[2]}"
    wanted = expected(triton)
    source = shared_memory.create_shared_memory_region("source", f"/{name}_source", IDS.nbytes)
    target = shared_memory.create_shared_memory_region("target", f"/{name}_target", 4 * len(wanted))
    try:
        shared_memory.set_shared_memory_region(source, [IDS])
        triton.client.register_system_shared_memory("source", f"/{name}_source", IDS.nbytes)
        triton.client.register_system_shared_memory("target", f"/{name}_target", 4 * len(wanted))
        status = triton.json(triton.client.get_system_shared_memory_status())
        assert "source" in str(status)
        assert "target" in str(status)
        given = inputs(triton.module)
        given[0] = triton.module.InferInput("input_ids", IDS.shape, "INT32")
        given[0].set_shared_memory("source", IDS.nbytes)
        output = triton.module.InferRequestedOutput("output_ids")
        output.set_shared_memory("target", 4 * len(wanted))
        triton.client.infer("tensorrt_llm", given, outputs=[output])
        found = shared_memory.get_contents_as_numpy(target, np.int32, [len(wanted)])
        assert found.tolist() == wanted
        triton.client.unregister_system_shared_memory("source")
        with pytest.raises(InferenceServerException, match="Unable to find"):
            triton.client.infer("tensorrt_llm", given)
    finally:
        triton.client.unregister_system_shared_memory()
        shared_memory.destroy_shared_memory_region(source)
        shared_memory.destroy_shared_memory_region(target)


def test_classification_returns_the_largest_values(triton: Any) -> None:
    ids = expected(triton)
    output = triton.module.InferRequestedOutput("output_ids", class_count=2)
    found = triton.client.infer("tensorrt_llm", inputs(triton.module), outputs=[output]).as_numpy(
        "output_ids"
    )
    best = sorted(range(len(ids)), key=lambda index: (-ids[index], index))[:2]
    texts = [
        value.decode() if isinstance(value, bytes) else value for value in found.ravel().tolist()
    ]
    assert texts == [f"{ids[index]}:{index}" for index in best]


def test_request_ids_priorities_and_timeouts_are_accepted(triton: Any) -> None:
    answer = triton.client.infer(
        "tensorrt_llm", inputs(triton.module), request_id="mine", priority=1, timeout=30_000_000
    )
    assert triton.json(answer.get_response())["id"] == "mine"
    assert answer.as_numpy("output_ids").ravel().tolist() == expected(triton)


def test_exceeded_timeout_is_an_error(triton: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"[Tt]imeout"):
        triton.client.infer("tensorrt_llm", inputs(triton.module, 200), timeout=1)


def test_statistics_count_the_requests(triton: Any) -> None:
    def successes() -> int:
        found = triton.json(triton.client.get_inference_statistics("tensorrt_llm"))
        return int(found["model_stats"][0]["inference_stats"]["success"].get("count", 0))

    before = successes()
    for _ in range(3):
        triton.client.infer("tensorrt_llm", inputs(triton.module))
    assert successes() == before + 3


def test_tracing_is_switched_on_and_off(triton: Any, places: Places) -> None:
    def count() -> int:
        return len(list(places.trace_file.parent.glob("trace.json.*")))

    before = count()
    triton.client.infer("tensorrt_llm", inputs(triton.module))
    shown = triton.client.update_trace_settings(
        "tensorrt_llm", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    )
    assert "TIMESTAMPS" in str(triton.json(shown))
    try:
        triton.client.infer("tensorrt_llm", inputs(triton.module), request_id="traced")
        wait_for(lambda: count() == before + 1)
    finally:
        triton.client.update_trace_settings(
            "tensorrt_llm", {"trace_level": None, "trace_rate": None}
        )
    triton.client.infer("tensorrt_llm", inputs(triton.module))
    newest = json.loads((places.trace_file.parent / f"trace.json.{before}").read_text())
    assert [one["request_id"] for one in newest if "request_id" in one] == ["traced"]
    assert count() == before + 1


def test_log_settings_are_changed_and_restored(triton: Any) -> None:
    changed = triton.client.update_log_settings({"log_verbose_level": 1})
    assert "1" in str(triton.json(changed))
    restored = triton.client.update_log_settings({"log_verbose_level": 0})
    assert triton.json(restored) == triton.json(triton.client.get_log_settings())


def test_metadata_configuration_and_readiness(triton: Any) -> None:
    metadata = triton.json(triton.client.get_model_metadata("tensorrt_llm"))
    assert (metadata["name"], metadata["versions"]) == ("tensorrt_llm", ["1"])
    assert "input_ids" in [tensor["name"] for tensor in metadata["inputs"]]
    config = triton.json(triton.client.get_model_config("tensorrt_llm"))
    assert config.get("config", config)["name"] == "tensorrt_llm"
    assert triton.client.is_server_live()
    assert triton.client.is_server_ready()
    assert triton.client.is_model_ready("tensorrt_llm")
    assert not triton.client.is_model_ready("nope")


def test_models_are_unloaded_and_loaded(triton: Any) -> None:
    triton.client.unload_model("postprocessing")
    wait_for(lambda: not triton.client.is_model_ready("postprocessing"))
    triton.client.load_model("postprocessing")
    assert triton.client.is_model_ready("postprocessing")
    index = str(triton.json(triton.client.get_model_repository_index()))
    assert "postprocessing" in index
    assert "READY" in index


def test_requests_of_a_grpc_stream_are_answered_in_order(places: Places) -> None:
    """The blocking client sends several requests at once."""
    triton = Grpc(places)
    arrived = queue.Queue[Any]()
    wanted = expected(triton)
    triton.client.start_stream(lambda result, error: arrived.put((result, error)))
    try:
        for number in range(3):
            triton.client.async_stream_infer(
                "tensorrt_llm", inputs(grpc_client), request_id=f"s{number}"
            )
        answers = [arrived.get(timeout=20) for _ in range(3)]
    finally:
        triton.client.stop_stream()
        triton.client.close()
    assert [error for _, error in answers] == [None, None, None]
    assert [result.get_response().id for result, _ in answers] == ["s0", "s1", "s2"]
    assert [result.as_numpy("output_ids").ravel().tolist() for result, _ in answers] == [wanted] * 3
