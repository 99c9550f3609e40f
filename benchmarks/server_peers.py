"""The servers that `server.py` compares. Each runs in its own process and serves trivial models.

`python server_peers.py KIND REPOSITORY HTTP GRPC METRICS` starts Slipstream. With the kind `own`
the models are built in; with `model.py` the repository's Python code runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
WORDS = 1000
STEP_VARIABLE = "INSTANT_ENGINE_STEP_MS"  # for the engine's process
ECHO_CONFIG = """name: "echo"
backend: "python"
max_batch_size: 0
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ECHO_CODE = """import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.echo(request) for request in requests]

    def echo(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)])
"""
STREAM_CONFIG = """name: "ensemble"
backend: "python"
max_batch_size: 64
model_transaction_policy { decoupled: True }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
STREAM_CODE = """import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().ravel()[0] for tensor in request.inputs()}
            start = int(given["text_input"])
            self.count(request.get_response_sender(), start, start + int(given["max_tokens"]))

    def count(self, sender, start, end):
        for number in range(start + 1, end + 1):
            text = np.array([b" %d" % (number % 1000)], dtype=object)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(response, flags=final if number == end else 0)
"""


def write_python_repository(folder: Path) -> Path:
    for name, config, code in (
        ("echo", ECHO_CONFIG, ECHO_CODE),
        ("ensemble", STREAM_CONFIG, STREAM_CODE),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text(code)
    return folder


def write_own_repository(folder: Path) -> Path:
    """Write the usual four models around an engine that takes no time, and the echo model."""
    from slipstream.model.spec import ModelSpec
    from slipstream.repository.templates import write_repository
    from slipstream.version import VERSION
    from slipstream.weights.engine_config import BuildLimits, GenerationDefaults, config_document
    from slipstream.weights.parameters import Quantisation

    engine = folder / "engine"
    engine.mkdir(parents=True)
    spec = ModelSpec("LlamaForCausalLM", WORDS, 8, 1, 1, 1, 8, 8, 4096)
    limits = BuildLimits(max_input_len=2048, max_seq_len=4096)
    own = {"content_hash": "none", "files": {}, "source": "instant"}
    document = config_document(
        VERSION, spec, "float32", Quantisation(), limits, GenerationDefaults(), own
    )
    (engine / "config.json").write_text(json.dumps(document))
    # words with a space before them, decoded as those of GPT-2, Llama 3 and Qwen
    vocabulary = {
        "type": "WordLevel",
        "vocab": {f"Ġ{number}": number for number in range(WORDS)},
        "unk_token": "Ġ0",
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": vocabulary,
    }
    (engine / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = json.dumps({"chat_template": "{{ messages[-1].content }}"})
    (engine / "tokenizer_config.json").write_text(template)
    repository = folder / "repository"
    write_repository(repository, "tensorrt_llm_bls", engine, engine, 64)
    (repository / "echo" / "1").mkdir(parents=True)
    (repository / "echo" / "config.pbtxt").write_text(ECHO_CONFIG)
    return repository


def create_echo_factory() -> Any:
    """Return the factory of the built-in echo model."""
    from slipstream.server.kserve.inference import InferResponse, ServedModel
    from slipstream.server.kserve.tensors import Tensor
    from slipstream.server.models.factories import ModelFactory

    class Echo(ServedModel):
        def __init__(self, model: Any) -> None:
            self.config = model.config

        async def infer(self, request: Any) -> AsyncGenerator[Any, None]:
            given = request.inputs["text_input"]
            tensor = Tensor("text_output", "BYTES", given.shape, given.data)
            yield InferResponse([tensor], final=True)

    class EchoFactory(ModelFactory):
        def claims(self, model: Any) -> bool:
            return bool(model.name == "echo")

        async def load(self, model: Any, version: int, registry: Any) -> Any:
            return Echo(model)

    return EchoFactory()


def serve(
    kind: str, repository: str, http: int, grpc: int, metrics: int, frontends: int = 1
) -> int:
    from slipstream.server.lifecycle import run_server
    from slipstream.server.options import Port, ServerOptions

    options = ServerOptions(
        repositories=(Path(repository),),
        http=Port(http, "127.0.0.1"),
        grpc=Port(grpc, "127.0.0.1"),
        metrics=Port(metrics, "127.0.0.1"),
        allow_python_models=kind == "model.py",
        engine_command=(sys.executable, str(HERE / "instant_engine.py")),
    )
    if frontends > 1:  # earlier versions have no such option
        options = replace(options, frontends=frontends)
    factories = [create_echo_factory()] if kind == "own" else []
    return run_server(options, factories)


class Peer:
    """A running server: `http_port`, `grpc_port`. `ready_path` answers 200 when it is ready."""

    def __init__(
        self,
        name: str,
        command: list[str],
        ports: list[int],
        log: Path,
        environment: dict[str, str],
        ready_path: str = "/v2/health/ready",
        built_in: bool = False,
    ) -> None:
        """`built_in`: the models are part of the server."""
        self.name = name
        self.built_in = built_in
        self.paced = float(environment.get(STEP_VARIABLE, "0")) > 0
        self.http_port = ports[0]
        self.grpc_port = ports[1]
        self._ready_path = ready_path
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = Path(self._log.name).read_text("utf-8", "replace")
                raise RuntimeError(f"{self.name} did not start:\n{text[-2000:]}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.http_port}{self._ready_path}"
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and its child processes so far."""
        return sum(map(_cpu_seconds, _with_children(self.process.pid)))

    def stop(self) -> None:
        """Stop the server, and kill what is left of its process group."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


def _with_children(process: int) -> list[int]:
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            found += _with_children(int(child))
    return found


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_ours(
    kind: str,
    folder: Path,
    step_milliseconds: float = 0.0,
    name: str = "",
    checkout: Path = ROOT,
    frontends: int = 1,
) -> Peer:
    """`checkout`: the folder whose `slipstream` package runs; `frontends`: its processes"""
    repository = (
        write_own_repository(folder)
        if kind == "own"
        else write_python_repository(folder / "repository")
    )
    ports = free_ports()
    command = [
        sys.executable,
        str(HERE / "server_peers.py"),
        kind,
        str(repository),
        *map(str, ports),
        str(frontends),
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout), STEP_VARIABLE: str(step_milliseconds)}
    name = name or f"slipstream, {kind}"
    own = kind == "own"
    return Peer(name, command, ports, folder / "log", environment, built_in=own)


def start_triton(binary: Path, folder: Path) -> Peer:
    sys.path.append(str(ROOT / "tests" / "conformance" / "live"))
    from real_triton import triton_command

    ports = free_ports()
    command, environment = triton_command(
        binary, write_python_repository(folder / "repository"), folder, ports
    )
    return Peer("triton", command, ports, folder / "log", environment)


def free_ports(count: int = 3) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
