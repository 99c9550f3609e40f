"""`slipstream start` with and without leave to run a repository's Python models, from the outside."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from python_model_harness import write_model
from tiny_server import TinyServer, children_of, command_of, is_running, make_repository, wait_for

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils
open({marker!r}, "w").write("ran")
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(name="shouts", description="Shouts", kind=pb_utils.MetricFamily.COUNTER)
        self.shouts = family.Metric(labels=dict(model=args["model_name"]))
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        self.shouts.increment(1)
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(1, 1)
        inputs = [pb_utils.Tensor("text_input", text), pb_utils.Tensor("max_tokens", np.array([[3]], np.int32))]
        inner = pb_utils.InferenceRequest(model_name="ensemble", inputs=inputs, requested_output_names=["text_output"])
        responses = list(inner.exec(decoupled=True))
        if responses[0].has_error():
            return responses[0]
        text = b"".join(response.output_tensors()[0].as_numpy().ravel()[0] for response in responses)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text + b"!"], dtype=object))])
"""

PREPROCESSING = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        ids = [int(word) + 100 for word in given["QUERY"].ravel()[0].split()]  # unlike the built-in model
        nothing = np.array([[[0], [-1]]], np.int32)
        outputs = dict(
            INPUT_ID=np.array([ids], np.int32), REQUEST_INPUT_LEN=np.array([[len(ids)]], np.int32),
            BAD_WORDS_IDS=nothing, STOP_WORDS_IDS=nothing, EMBEDDING_BIAS=np.zeros((1, 0), np.float32),
            REQUEST_OUTPUT_LEN=given["REQUEST_OUTPUT_LEN"].astype(np.int32), OUT_END_ID=np.array([[999]], np.int32),
            OUT_PAD_ID=np.array([[999]], np.int32))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
"""
POSTPROCESSING = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        count = int(given["SEQUENCE_LENGTH"].ravel()[0])
        text = "".join(f"<{token}>" for token in given["TOKENS_BATCH"].reshape(-1)[:count])
        outputs = [pb_utils.Tensor("OUTPUT", np.array([text.encode()], dtype=object))]
        outputs += [pb_utils.Tensor("OUT_" + name, given[name]) for name in given if name.endswith(("PROBS", "LOGITS"))]
        return pb_utils.InferenceResponse(outputs)
"""


def repository(folder: Path) -> tuple[Path, Path]:
    marker = folder / "marker"
    return write_model(make_repository(folder), "shout", CODE.format(marker=str(marker))), marker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tmp_path_factory.mktemp("served")
    running = TinyServer(
        repository(folder)[0], folder / "tmp", "--allow-python-models"
    ).wait_started()
    yield running
    running.close()


def post(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode()), timeout=30
    ) as answer:
        return json.load(answer)


def test_generate_and_infer_reach_the_engine_through_a_python_model(server: TinyServer) -> None:
    generated = post(f"{server.url}/v2/models/shout/generate", {"text_input": "5"})
    assert generated["text_output"].split() == ["6", "7", "8!"]
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["9"]}
    inferred = post(f"{server.url}/v2/models/shout/infer", {"inputs": [tensor]})
    assert inferred["outputs"][0]["data"][0].split() == ["10", "11", "12!"]


def test_metrics_of_a_python_model_are_on_the_metrics_port(server: TinyServer) -> None:
    post(f"{server.url}/v2/models/shout/generate", {"text_input": "5"})
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics", timeout=30
    ) as answer:
        lines = answer.read().decode().splitlines()
    (shouts,) = [line for line in lines if line.startswith('shouts{model="shout"} ')]
    assert float(shouts.split()[1]) >= 1


def events(url: str, body: dict[str, Any]) -> list[Any]:
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode()), timeout=30
    ) as answer:
        return [
            json.loads(line[6:])
            for line in answer.read().splitlines()
            if line.startswith(b"data: ")
        ]


def test_python_steps_in_the_standard_ensemble(tmp_path: Path) -> None:
    folder = make_repository(tmp_path)
    for name, code in (("preprocessing", PREPROCESSING), ("postprocessing", POSTPROCESSING)):
        (folder / name / "1").mkdir(exist_ok=True)
        (folder / name / "1" / "model.py").write_text(code)
    body = {"text_input": "1 5", "max_tokens": 3}
    custom = TinyServer(folder, tmp_path / "tmp", "--allow-python-models").wait_started()
    try:
        pieces = events(f"{custom.url}/v2/models/ensemble/generate_stream", body | {"stream": True})
        assert "".join(piece["text_output"] for piece in pieces) == "<106><107><108>"
    finally:
        custom.close()
    # without the flag the built-in models replace the files
    stock = TinyServer(folder, tmp_path / "tmp").wait_started()
    try:
        answers = events(f"{stock.url}/v2/models/ensemble/generate_stream", body)
        assert "".join(answer["text_output"] for answer in answers).split() == ["6", "7", "8"]
    finally:
        stock.close()


def test_the_model_process_ends_with_the_server(tmp_path: Path) -> None:
    running = TinyServer(
        repository(tmp_path)[0], tmp_path / "tmp", "--allow-python-models"
    ).wait_started()
    workers = [
        child
        for child in children_of(running.process.pid)
        if "python_models.worker" in command_of(child)
    ]
    assert len(workers) == 1
    running.close()
    wait_for(lambda: not is_running(workers[0]))


def test_without_the_flag_the_server_refuses_and_runs_no_model(tmp_path: Path) -> None:
    folder, marker = repository(tmp_path)
    refused = TinyServer(folder, tmp_path / "tmp")
    assert refused.wait_exit() != 0
    assert any("'shout'" in line for line in refused.lines)
    assert not marker.exists()


SLOW = """
import time, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        print("it works")
        time.sleep(1.0)
        given = [pb_utils.get_input_tensor_by_name(request, "text_input") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", one.as_numpy())]) for one in given]
"""


def test_a_stopping_server_waits_for_python_models(tmp_path: Path) -> None:
    """Also for one that takes longer than idle connections are kept open."""
    options = ["--allow-python-models"]
    running = TinyServer(
        write_model(tmp_path, "slow", SLOW), tmp_path / "tmp", *options, close_seconds=0.3
    )
    running.wait_started()
    body = json.dumps({"text_input": "still here"}).encode()
    with ThreadPoolExecutor() as asking:
        answer = asking.submit(
            urllib.request.urlopen, f"{running.url}/v2/models/slow/generate", body, 60
        )
        wait_for(lambda: any("it works" in line for line in running.lines))
        running.process.send_signal(signal.SIGTERM)
        assert json.load(answer.result())["text_output"] == "still here"
    assert running.process.wait(30) == 0
    assert any(
        "Waiting for in-flight requests to complete: 1 now" in line for line in running.lines
    )
