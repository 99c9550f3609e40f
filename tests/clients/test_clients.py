"""Client libraries of other projects against a server with the default model.

Each library runs in an environment of its own, because their requirements exclude each other. What
they return is compared with a plain request for the same text.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from client_environment import environment
from real_server import RealServer

pytestmark = pytest.mark.clients

SCRIPTS = Path(__file__).parent / "scripts"
MODEL = "smollm2-135m"
QUESTION = "Name three colours."
# The model follows an example better than a schema in words.
INTRODUCTION = 'Ann is 3: {"name": "Ann", "age": 3}. Now, in the same format: Bob is 7.'
FRAMEWORKS = (
    "anthropic",
    "instructor",
    "langchain-openai",
    "litellm",
    "llama-index-llms-openai-like",
)
# No library may fetch anything but its requirements.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    command = ["-m", "slipstream.cli.main", "start", "--dtype", "float32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))  # where the server keeps its repository
        server = RealServer(folder, folder, *command)
    yield server.wait(300)
    server.close()


@pytest.fixture(scope="module")
def tokenizer(server: RealServer, folder: Path) -> Path:
    """The folder of the model's tokenizer, as clients that count tokens need it."""
    return folder / "home" / "engines" / MODEL


def post(server: RealServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"http://{server.http}{path}", data, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def chat_text(server: RealServer) -> str:
    """The greedy answer to the question."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
    }
    return post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def completion_text(server: RealServer) -> str:
    body = {"model": MODEL, "prompt": QUESTION, "temperature": 0, "max_tokens": 24}
    return post(server, "/v1/completions", body)["choices"][0]["text"]


def run(python: Path, arguments: Sequence[str | Path], **variables: str) -> str:
    """Return what a client prints."""
    environ = os.environ | OFFLINE | variables
    environ.pop("PYTHONPATH", None)
    finished = subprocess.run(
        [python, *arguments], capture_output=True, text=True, timeout=600, env=environ
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    return finished.stdout


def run_framework(server: RealServer, script: str, question: str = QUESTION) -> Any:
    python = environment("frameworks", FRAMEWORKS)
    base_url = f"http://{server.http}/v1"
    printed = run(python, [SCRIPTS / script, base_url, MODEL, question])
    return json.loads(printed.splitlines()[-1])


def test_langchain(server: RealServer, chat_text: str) -> None:
    found = run_framework(server, "langchain_client.py")
    assert found["text"] == found["streamed"] == chat_text
    assert found["batch"] == [chat_text]
    assert found["tokens"] == found["log_probs"] == 24
    assert sorted(found["structured"]) == ["function_calling", "json_mode", "json_schema"]
    for city in found["structured"].values():
        assert (city["name"], city["country"].lower()) == ("Paris", "france")
    assert found["called"] == found["streamed_call"] == ["weather"]
    assert found["streamed_arguments"] == [["city"]]


def test_litellm(server: RealServer, chat_text: str, completion_text: str) -> None:
    found = run_framework(server, "litellm_client.py")
    assert found == {
        "openai": chat_text,
        "openai stream": chat_text,
        "hosted_vllm": chat_text,
        "hosted_vllm stream": chat_text,
        "triton": completion_text,
        "triton stream": completion_text,
    }


def test_llama_index(server: RealServer, chat_text: str, completion_text: str) -> None:
    assert run_framework(server, "llama_index_client.py") == {
        "chat": chat_text,
        "chat stream": chat_text,
        "complete": completion_text,
        "complete stream": completion_text,
    }


def test_instructor(server: RealServer) -> None:
    found = run_framework(server, "instructor_client.py", INTRODUCTION)
    bob = {"name": "Bob", "age": 7}
    assert (found["TOOLS"], found["JSON_SCHEMA"]) == (bob, bob)
    assert found["JSON"]


def test_anthropic(server: RealServer, chat_text: str) -> None:
    found = run_framework(server, "anthropic_client.py")
    assert found["text"] == found["streamed"] == chat_text
    assert (found["called"], found["stop_reason"]) == (["weather"], "tool_use")
    assert found["cities"][0] in ("Rome", "Bonn")


@pytest.mark.parametrize(
    ("backend", "model"), [("trt", "ensemble"), ("vllm", MODEL), ("sglang-oai", MODEL)]
)
def test_sglang_bench_serving(
    server: RealServer, tokenizer: Path, tmp_path: Path, backend: str, model: str
) -> None:
    packages = ("aiohttp", "datasets", "numpy", "pillow", "requests", "tqdm", "transformers")
    python = environment("sglang", [*packages, "setproctitle"])
    # The script alone: the package wants CUDA.
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "sglang==0.4.6"]
    run(python, command)
    (script,) = python.parents[1].glob("lib/*/site-packages/sglang/bench_serving.py")
    report = tmp_path / "report.jsonl"
    flags = ["--backend", backend, "--model", model, "--base-url", f"http://{server.http}"]
    flags += [
        "--tokenizer",
        tokenizer,
        "--dataset-name",
        "random-ids",
        "--dataset-path",
        os.devnull,
    ]
    flags += ["--random-input", "16", "--random-output", "8", "--random-range-ratio", "1.0"]
    run(python, [script, *flags, "--num-prompts", "8", "--output-file", report])
    found = json.loads(report.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (8, 64)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("kserve --streaming", "grpc"),
        ("kserve", "grpc"),
        ("generate --streaming --endpoint v2/models/ensemble/generate_stream", "http"),
        ("chat --streaming", "http"),
        ("completions", "http"),
    ],
)
def test_genai_perf(
    server: RealServer, tokenizer: Path, tmp_path: Path, endpoint: str, port: str
) -> None:
    python = environment("genai-perf", ["genai-perf==0.0.16", "nvidia-cuda-runtime-cu12"])
    programs = _install_perf_analyzer(python)
    flags = ["-m", "ensemble", "--endpoint-type", *endpoint.split(), "--tokenizer", str(tokenizer)]
    if "kserve" in endpoint:
        flags += ["--backend", "tensorrtllm"]
    flags += ["--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8", "--url"]
    flags += [getattr(server, port), "--request-count", "6", "--concurrency", "2"]
    flags += ["--artifact-dir", str(tmp_path), "--random-seed", "1"]
    run(python, [python.parent / "genai-perf", "profile", *flags], **programs)
    (report,) = tmp_path.rglob("profile_export_genai_perf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 6
    assert found["output_sequence_length"]["avg"] >= 7  # joined text may have fewer tokens


def _install_perf_analyzer(python: Path) -> dict[str, str]:
    """Install NVIDIA's perf_analyzer and return the variables it runs with.

    The program is a part of tritonclient's wheel. One of its libraries is in nvidia-pytriton's.
    """
    folder = python.parents[1]
    libraries = folder / "lib-perf-analyzer"
    if not (libraries / "libb64.so.0d").exists():
        pip = ["-m", "pip", "install", "--quiet", "--no-deps"]
        run(python, [*pip, "tritonclient==2.51.0"])
        run(python, [*pip, "--target", folder / "pytriton", "nvidia-pytriton==0.7.0"])
        libraries.mkdir(exist_ok=True)
        (b64,) = folder.glob("pytriton/nvidia_pytriton.libs/libb64-*.so.0d")
        (cuda,) = folder.glob("lib/*/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12")
        (libraries / cuda.name).symlink_to(cuda)
        (libraries / "libb64.so.0d").symlink_to(b64)
    return {
        "LD_LIBRARY_PATH": str(libraries),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }


def test_bentoml(server: RealServer, tmp_path: Path) -> None:
    python = environment("bentoml", ["bentoml", "tritonclient[grpc]"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ = os.environ | OFFLINE | {"TRITON_URL": server.grpc, "BENTOML_HOME": str(tmp_path)}
    environ.pop("PYTHONPATH", None)
    command = [python, "-m", "bentoml", "serve", "bento_service:Generation", "--port", port]
    with (tmp_path / "bento.log").open("wb") as log:
        service = subprocess.Popen(command, cwd=SCRIPTS, env=environ, stdout=log, stderr=log)
    try:
        _wait_for(port, service)
        url = f"http://127.0.0.1:{port}"
        first, second = json.loads(run(python, [SCRIPTS / "bento_client.py", url, QUESTION, "16"]))
    finally:
        service.terminate()
        service.wait(30)
    body = {"text_input": QUESTION, "max_tokens": 16}
    whole = post(server, "/v2/models/ensemble/generate", body)["text_output"]
    assert "".join(first) == "".join(second)
    assert "".join(first) == whole


def _wait_for(port: str, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while service.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the BentoML service did not start")
