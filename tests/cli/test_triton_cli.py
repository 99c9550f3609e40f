"""The commands of Triton CLI's own end-to-end tests, on Python models like theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import CommandResult, run_cli
from tiny_server import MODEL, TinyServer, make_repository

from slipstream.cli.commands import run_command

PROMPT = "machine learning is"

# models without batching: one adds and subtracts, one answers with its input
CONFIGS = {
    "add_sub": """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
input [ { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
""",
    "mock_llm": """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
""",
}
CODE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.answer(request)) for request in requests]
    def read(self, request, name):
        return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
"""
ANSWERS = {
    "add_sub": """
    def answer(self, request):
        first, second = self.read(request, "INPUT0"), self.read(request, "INPUT1")
        return [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
""",
    "mock_llm": """
    def answer(self, request):
        return [pb_utils.Tensor("text_output", self.read(request, "text_input"))]
""",
}


def write_models(repository: Path) -> Path:
    for name, config in CONFIGS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(CODE + ANSWERS[name])
    return repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tmp_path_factory.mktemp("triton-cli")
    repository = write_models(folder / "models")
    running = TinyServer(repository, folder / "tmp", "--allow-python-models").wait_started()
    yield running
    running.close()


def port(server: TinyServer, protocol: str) -> int:
    return server.ports["HTTPService" if protocol == "http" else "GRPCInferenceService"]


def triton(server: TinyServer, protocol: str, *words: str) -> CommandResult:
    return run_cli([*words, "-i", protocol, "-p", port(server, protocol)], "triton")


both_protocols = pytest.mark.parametrize("protocol", ["grpc", "http"])


@both_protocols
def test_status_and_config(server: TinyServer, protocol: str) -> None:
    status = triton(server, protocol, "status")
    assert json.loads(status.stdout) == {"live": True, "ready": True}
    config = triton(server, protocol, "config", "-m", "mock_llm")
    assert json.loads(config.stdout)["name"] == "mock_llm"


@both_protocols
def test_infer_without_a_prompt_sends_random_values(server: TinyServer, protocol: str) -> None:
    result = triton(server, protocol, "infer", "-m", "add_sub")
    assert (result.exit_code, result.stderr) == (0, "")
    tensors = {}
    for line in result.stdout.splitlines():
        kind, _, text = line.partition(": ")
        tensor = json.loads(text)
        assert (tensor["dtype"], tensor["shape"]) == ("FP32", [4])
        tensors[tensor["name"]] = (kind, tensor["value"])
    assert {name: kind for name, (kind, _) in tensors.items()} == {
        "INPUT0": "Input",
        "INPUT1": "Input",
        "OUTPUT0": "Output",
        "OUTPUT1": "Output",
    }
    pairs = list(zip(tensors["INPUT0"][1], tensors["INPUT1"][1], strict=True))
    sums = [first + second for first, second in pairs]
    differences = [first - second for first, second in pairs]
    assert tensors["OUTPUT0"][1] == pytest.approx(sums, abs=1e-6)
    assert tensors["OUTPUT1"][1] == pytest.approx(differences, abs=1e-6)


@both_protocols
def test_infer_with_a_prompt_prints_the_answer(server: TinyServer, protocol: str) -> None:
    result = triton(server, protocol, "infer", "-m", "mock_llm", "--prompt", PROMPT)
    assert (result.exit_code, result.output) == (0, f"{PROMPT}\n")
    address = f"localhost:{port(server, protocol)}"
    words = ["infer", "-m", "mock_llm", "--prompt", PROMPT, "-i", protocol, "-u", address]
    assert run_cli(words).stdout == f"{PROMPT}\n"


@both_protocols
def test_infer_of_a_text_model_needs_a_prompt(server: TinyServer, protocol: str) -> None:
    result = triton(server, protocol, "infer", "-m", "mock_llm")
    assert result.exit_code == 1
    assert result.stderr == (
        "triton - ERROR - model 'mock_llm' takes a text in 'text_input'; give it with --prompt\n"
    )


def test_profile_takes_flags_of_perf_analyzer(
    server: TinyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["profile", "-m", "mock_llm", "--backend", "tensorrtllm"]
    words += ["--url", f"localhost:{port(server, 'grpc')}", "--synthetic-input-tokens-mean", "100"]
    flags = ["--", "--request-count", "10", "--concurrency-range", "2", "--max-threads=4", "-v"]
    result = run_cli([*words, *flags], "triton")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "[INFO] Measuring 10 requests, 2 in flight." in result.stdout
    assert "words are counted, not tokens" in result.stdout.splitlines()[0]
    folder = tmp_path / "artifacts" / "mock_llm-triton-tensorrtllm-concurrency2"
    report = json.loads((folder / "profile_export_genai_perf.json").read_text())
    assert report["input_sequence_length"]["avg"] == 100
    assert report["output_sequence_length"]["avg"] == 100  # the model repeats its input
    export = json.loads((folder / "profile_export.json").read_text())
    assert len(export["experiments"][0]["requests"]) == 10


def test_profile_of_a_model_without_text_names_perf_analyzer(server: TinyServer) -> None:
    url = f"localhost:{port(server, 'grpc')}"
    result = run_cli(["profile", "-m", "add_sub", "-u", url], "triton")
    assert result.exit_code == 1
    assert result.stderr == (
        "triton - ERROR - model 'add_sub' does not take and give text; name an ensemble or a BLS "
        "model with -m, or measure this model with perf_analyzer\n"
    )


@both_protocols
def test_perf_analyzer_measures_a_model_without_text(
    server: TinyServer, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "add_sub", "-i", protocol, "-u", f"localhost:{port(server, protocol)}"]
    assert run_command("perf-analyzer", [*words, "--request-count", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    Request count: 7" in lines
    assert "    Successful request count: 7" in lines


def test_metrics_count_a_request(server: TinyServer) -> None:
    def count() -> float:
        metrics_port = server.ports["Metrics Service"]
        printed = run_cli(["metrics", "-p", metrics_port], "triton").stdout
        metrics = json.loads(printed)["nv_inference_request_success"]["metrics"]
        (value,) = [one["value"] for one in metrics if one["labels"]["model"] == "mock_llm"]
        return float(value)

    before = count()
    triton(server, "grpc", "infer", "-m", "mock_llm", "--prompt", PROMPT)
    assert count() == before + 1


def test_the_openai_frontend_answers_with_the_given_chat_template(tmp_path: Path) -> None:
    template = json.dumps({"chat_template": "{{ messages[0].content }} 40"})
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "tokenizer_config.json").write_text(template)
    flags = ["--frontend", "openai", "--openai-chat-template-tokenizer", str(tmp_path / "chat")]
    server = TinyServer(make_repository(tmp_path), tmp_path / "tmp", *flags).wait_started()
    try:
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        assert "nv_inference_request_success" in httpx.get(f"{server.url}/metrics").text
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "7"}],
            "max_tokens": 2,
            "temperature": 0,
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "41 42"
        for endpoint_type, stream in (("chat", True), ("chat", False), ("completions", True)):
            check_openai_profile(server, tmp_path, endpoint_type, stream)
    finally:
        server.close()


def check_openai_profile(
    server: TinyServer, folder: Path, endpoint_type: str, streaming: bool
) -> None:
    """Measure ten requests over OpenAI's API, and read the files that are written."""
    words = ["profile", "-m", MODEL, "--service-kind", "openai", "--endpoint-type", endpoint_type]
    words += ["--url", f"localhost:{port(server, 'http')}", "--artifact-dir", str(folder)]
    words += ["--isl", "10", "--osl", "6", "--extra-inputs", "temperature:0"]
    words += ["--extra-inputs", "ignore_eos:true", *(["--streaming"] if streaming else [])]
    result = run_cli([*words, "--", "--request-count", "10"], "triton")
    assert (result.exit_code, result.stderr) == (0, "")
    results = folder / f"{MODEL}-openai-{endpoint_type}-concurrency1"
    report = json.loads((results / "profile_export_genai_perf.json").read_text())
    assert report["input_sequence_length"]["avg"] == 10
    assert report["output_sequence_length"]["avg"] == 6
    assert ("time_to_first_token" in report) == streaming
    export = json.loads((results / "profile_export.json").read_text())
    expected = {"chat": "v1/chat/completions", "completions": "v1/completions"}[endpoint_type]
    assert (export["service_kind"], export["endpoint"]) == ("openai", expected)
    requests = export["experiments"][0]["requests"]
    assert len(requests) == 10
    body = json.loads(requests[0]["request_inputs"]["payload"])
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (6, 0, True)
    assert body.get("stream", False) == streaming


def test_without_permission_the_start_names_the_cause(tmp_path: Path) -> None:
    server = TinyServer(write_models(tmp_path / "models"), tmp_path / "tmp")
    assert server.wait_exit() == 1
    for name in CONFIGS:
        cause = (
            f"{name}{os.sep}config.pbtxt: backend: '{name}' is a Python model, and code from a "
            "repository is not executed; give --allow-python-models to run it"
        )
        assert any(cause in line for line in server.lines)
    assert not any("no engine model" in line for line in server.lines)
