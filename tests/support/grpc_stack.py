"""gRPC and metrics on a tiny real engine in this process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as triton

from slipstream.engine.settings import EngineSettings
from slipstream.repository.models import read_repository
from slipstream.repository.templates import write_repository
from slipstream.server.engine_link.in_process import InProcessEngine
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.build import build_registry
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer
from slipstream.weights.load import start_engine

SETTINGS = EngineSettings(dtype="float32", device="cpu", cache_tokens=2048, max_rows=4, threads=1)
KINDS = {
    "INT32": np.int32,
    "BOOL": np.bool_,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BYTES": object,
}


@dataclass
class Stack:
    address: str
    client: triton.InferenceServerClient
    metrics: ServerMetrics
    engine: InProcessEngine
    registry: ModelRegistry
    state: ServerState


@asynccontextmanager
async def running(
    engine_folder: Path,
    folder: Path,
    shared: ServerContext | None = None,
    options: GrpcOptions | None = None,
    metrics: ServerMetrics | None = None,
    keep: bool = False,
) -> AsyncIterator[Stack]:
    """Run the server. With `keep` the repository in `folder/repo` exists already."""
    if not keep:
        write_repository(folder / "repo", "chat", engine_folder, engine_folder, 8)
    repository = read_repository(folder / "repo")
    engine = InProcessEngine(start_engine(engine_folder, SETTINGS))
    metrics = metrics or ServerMetrics()
    metrics.watch_engine("tensorrt_llm", engine)
    generator: Any = TextGenerator(Tokenizer.load(engine_folder), engine)
    registry = build_registry(repository, {"tensorrt_llm": generator})
    registry.wrap(metrics.count)
    options = options or GrpcOptions()
    state = ServerState([engine])
    server = create_grpc_server(registry, state, shared, options)
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', options)}"
    await server.start()
    client = triton.InferenceServerClient(address)
    try:
        yield Stack(address, client, metrics, engine, registry, state)
    finally:
        await client.close()
        await server.stop(None)
        engine.close()


def tensor(name: str, values: list[Any], datatype: str) -> blocking.InferInput:
    array = np.array([values], dtype=KINDS[datatype])
    given = blocking.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def token_inputs(ids: list[int], count: int, stream: bool = True) -> list[blocking.InferInput]:
    return [
        tensor("input_ids", ids, "INT32"),
        tensor("input_lengths", [len(ids)], "INT32"),
        tensor("request_output_len", [count], "INT32"),
        tensor("streaming", [stream], "BOOL"),
    ]


def text_inputs(prompt: str, count: int, stream: bool = True) -> list[blocking.InferInput]:
    return [
        tensor("text_input", [prompt.encode()], "BYTES"),
        tensor("max_tokens", [count], "INT32"),
        tensor("stream", [stream], "BOOL"),
    ]


async def ask(
    client: triton.InferenceServerClient, *requests: dict[str, Any], **options: Any
) -> list[Any]:
    """Send requests on one stream; return the answers as (result, error)."""

    async def sending() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    async with asyncio.timeout(30):
        return [answer async for answer in client.stream_infer(sending(), **options)]


def request(model: str, inputs: list[Any], id: str = "1", **more: Any) -> dict[str, Any]:
    return {"model_name": model, "inputs": inputs, "request_id": id, **more}


def samples(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_coupled(engine_folder, tmp_path):
    """Run the same repository with models that answer exactly once."""
    write_repository(tmp_path / "repo", "chat", engine_folder, engine_folder, 8)
    for file in (tmp_path / "repo").glob("*/config.pbtxt"):
        file.write_text(re.sub(r"decoupled: \w+", "decoupled: false", file.read_text()))
    async with running(engine_folder, tmp_path, keep=True) as found:
        yield found
