"""The servers that `online.py` compares, on the same weights: ours, `vllm serve`, llama.cpp's."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from server_peers import ROOT, Peer, free_ports

from serving.cells import APIS, COMPLETIONS
from serving.load import Target
from serving.shapes import Model

OURS = "slipstream"
VLLM = "vllm"
LLAMA_SERVER = "llama-server"
LLAMA_PYTHON = "llama_cpp.server"
_MODEL = "bench"  # the name of the served model
_START_SECONDS = 600.0  # a peer may compile for minutes
_ENGINE = re.compile("engine_worker|EngineCore")  # in the command line of an engine's process
_OUTPUT_TOKENS = re.compile(r"^slipstream_output_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ServerOptions:
    device: str = "auto"
    rows: int = 0  # requests that run at the same time; 0: the server's default
    arguments: list[str] = field(default_factory=list)  # of our server
    peer_python: dict[str, str] = field(default_factory=dict)  # peer → interpreter that has it


class RunningServer:
    """A server that is ready, the APIs that it has, and how its processes are named."""

    apis: tuple[str, ...] = (COMPLETIONS,)

    def __init__(self, peer: Peer, target: Target) -> None:
        self.peer = peer
        self.target = target
        self.name = peer.name

    def kind_of(self, process: int, command: str) -> str:
        """Return the kind of a process: the server itself, an engine, or a frontend."""
        if process == self.peer.process.pid:
            return "server"
        return "engine" if _ENGINE.search(command) else "frontend"

    def output_tokens(self) -> int | None:
        """Return the number of tokens that the server has generated, if it counts them."""
        return None

    def stop(self) -> None:
        self.peer.stop()


class OurServer(RunningServer):
    apis = APIS

    def __init__(self, peer: Peer, target: Target, metrics_port: int) -> None:
        super().__init__(peer, target)
        self._metrics_port = metrics_port

    def output_tokens(self) -> int | None:
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = _OUTPUT_TOKENS.findall(answer.read().decode())
        return round(sum(map(float, found))) if found else None


def write_served_repository(model: Model, folder: Path, rows: int) -> Path:
    """Write the repository of an import. `rows` sets `max_num_sequences`."""
    from slipstream.repository.templates import write_repository
    from slipstream.weights.engine_config import read_engine_config

    limits = read_engine_config(model.engine).build
    repository = folder / "repository"
    write_repository(repository, _MODEL, model.engine, model.engine, limits.max_batch_size)
    if rows:
        config = repository / "tensorrt_llm" / "config.pbtxt"
        value = f'parameters {{ key: "max_num_sequences" value {{ string_value: "{rows}" }} }}\n'
        config.write_text(config.read_text() + value)
    return repository


def start_ours(model: Model, folder: Path, options: ServerOptions) -> OurServer:
    folder.mkdir(parents=True, exist_ok=True)
    repository = write_served_repository(model, folder, options.rows)
    ports = free_ports()
    command = [sys.executable, "-m", "slipstream.cli.main", "start", "--repo", str(repository)]
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{name}-port", str(port)]
    command += ["--device", options.device, "--exit-timeout-secs", "1", *options.arguments]
    if model.dtype == "float32":
        command += ["--dtype", "float32"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    peer = Peer(OURS, command, ports, folder / "log", environment)
    target = Target(_MODEL, ports[0], ports[1], text_model="ensemble")
    return OurServer(peer, target, ports[2])


def start_vllm(model: Model, folder: Path, options: ServerOptions) -> RunningServer:
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    python = options.peer_python.get(VLLM, sys.executable)
    command = [str(Path(python).parent / "vllm"), "serve", str(model.hugging_face)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", _MODEL]
    command += ["--dtype", model.dtype]
    peer = Peer(VLLM, command, [port, 0], folder / "log", dict(os.environ), "/health")
    return RunningServer(peer, Target(_MODEL, port))


def start_llama(model: Model, folder: Path, options: ServerOptions) -> RunningServer:
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    rows = str(options.rows or 64)
    command = ["llama-server", "-m", str(model.gguf), "--port", str(port), "--parallel", rows]
    command += ["--ctx-size", str(2048 * int(rows)), "--alias", _MODEL, "--no-webui"]
    peer = Peer(LLAMA_SERVER, command, [port, 0], folder / "log", dict(os.environ), "/health")
    return RunningServer(peer, Target(_MODEL, port))


def start_llama_python(model: Model, folder: Path, options: ServerOptions) -> RunningServer:
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    python = options.peer_python.get(LLAMA_PYTHON, sys.executable)
    command = [python, "-m", "llama_cpp.server", "--model", str(model.gguf), "--n_ctx", "4096"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--model_alias", _MODEL]
    peer = Peer(LLAMA_PYTHON, command, [port, 0], folder / "log", dict(os.environ), "/v1/models")
    return RunningServer(peer, Target(_MODEL, port, usage=False))


Start = Callable[[Model, Path, ServerOptions], RunningServer]
STARTS: dict[str, Start] = {
    OURS: start_ours,
    VLLM: start_vllm,
    LLAMA_SERVER: start_llama,
    LLAMA_PYTHON: start_llama_python,
}
PEERS = tuple(name for name in STARTS if name != OURS)


def is_installed(peer: str, options: ServerOptions) -> bool:
    """Return whether a peer can be started here."""
    python = options.peer_python.get(peer)
    if python is not None:
        return True
    if peer == LLAMA_SERVER:
        return shutil.which(peer) is not None
    return importlib.util.find_spec(peer.split(".")[0]) is not None


def can_serve(peer: str, model: Model) -> bool:
    """Return whether the model exists in the format of a peer."""
    found = model.hugging_face if peer == VLLM else model.gguf
    return peer == OURS or found is not None


def start(name: str, model: Model, folder: Path, options: ServerOptions) -> RunningServer:
    """Start a server and wait until it is ready."""
    running = STARTS[name](model, folder, options)
    try:
        running.peer.wait_ready(_START_SECONDS)
    except BaseException:
        running.stop()
        raise
    return running
