"""A real gRPC server on a loopback port, and a client that sends recorded messages."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fixed_models import FixedModels
from google.protobuf import json_format
from recorded_models import RECORDED, RecordedModel

from slipstream.repository.models import read_repository
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol.messages import SERVICE, method_messages
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.grpc.transport import Transport
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import InferRequest, InferResponse, ModelRegistry
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.build import build_registry
from slipstream.server.models.ensemble import EnsembleModel
from slipstream.server.services import create_context

REPOSITORIES = Path(__file__).parents[1] / "conformance" / "repos"
CASES = [
    json.loads(line)
    for line in (REPOSITORIES.parent / "golden" / "grpc.jsonl").read_text("utf-8").splitlines()
]
COMPRESSION = {"Gzip": grpc.Compression.Gzip, "Deflate": grpc.Compression.Deflate, None: None}


class AddSubtract(RecordedModel):
    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        first = request.inputs["INPUT0"]
        second = request.inputs["INPUT1"]
        yield InferResponse(
            [
                Tensor("OUTPUT0", "INT32", first.shape, first.array() + second.array()),
                Tensor("OUTPUT1", "INT32", first.shape, first.array() - second.array()),
            ]
        )


class Same(RecordedModel):
    """Returns the input under the output's name."""

    async def answers(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        given = next(iter(request.inputs.values()))
        yield InferResponse(
            [Tensor(self.config.outputs[0].name, given.datatype, given.shape, given.data)]
        )


MAKERS: dict[str, Any] = {
    **RECORDED,
    "addsub": AddSubtract,
    "classify": Same,
    "seq": Same,
    "raw1": Same,
}
del MAKERS["ens"]  # served as an ordinary ensemble


def model_names() -> set[str]:
    return {path.parent.name for path in REPOSITORIES.glob("*/*/config.pbtxt")}


@contextmanager
def loaded_server(mode: Any, names: list[str]) -> Iterator[RunningGrpc]:
    """Run a server with a loader of the recorded models, with these loaded."""
    registry = ModelRegistry()
    folders = sorted(REPOSITORIES.iterdir())
    pool = EnginePool({}, Supervision(), ())
    loader = ModelLoader(folders, registry, pool, [FixedModels(MAKERS)], mode)
    with RunningGrpc(registry, ServerState([]), create_context(control=loader)) as server:
        loading = asyncio.run_coroutine_threadsafe(
            loader.load_all(names, loader.read()), server.loop
        )
        assert loading.result(20) == {}
        yield server


def recorded_registry() -> tuple[ModelRegistry, ServerMetrics]:
    """Return every model of the recordings, and the metrics that count their requests."""
    registry = ModelRegistry()
    metrics = ServerMetrics()
    registry.wrap(metrics.count)
    makers = {**MAKERS, "ens": lambda model, version: EnsembleModel(model.config, registry.find)}
    for folder in sorted(REPOSITORIES.iterdir()):
        names = [path.name for path in folder.iterdir()]
        mine = {name: makers[name] for name in names}
        for entry in build_registry(read_repository(folder, served_elsewhere=names), {}, mine):
            registry.add(entry.name, int(entry.version), entry.model)
    return registry, metrics


class RunningGrpc:
    """A server in a thread: `with RunningGrpc(registry, state) as server:`, on `server.port`."""

    def __init__(
        self,
        registry: ModelRegistry,
        state: ServerState,
        shared: ServerContext | None = None,
        transport: Transport = "core",
    ) -> None:
        self._options = GrpcOptions(transport=transport)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(registry, state, shared)), daemon=True
        )
        self._started = threading.Event()
        self.port = 0

    async def _serve(
        self, registry: ModelRegistry, state: ServerState, shared: ServerContext | None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        server = create_grpc_server(registry, state, shared, self._options)
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set()
        await self._stopped.wait()
        await server.stop(None)

    def __enter__(self) -> RunningGrpc:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(20)
        assert not self._thread.is_alive()


def message(name: str, document: dict[str, Any]) -> Any:
    """Return the request of a call from its recorded JSON."""
    return json_format.ParseDict(document, method_messages(name)[0]())


def document(found: Any) -> dict[str, Any]:
    return json_format.MessageToDict(found, preserving_proto_field_name=True)


class Client:
    def __init__(self, port: int) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()

    def unary(self, name: str, request: Any, **options: Any) -> Any:
        call = self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            lambda m: m.SerializeToString(),
            method_messages(name)[1].FromString,
        )
        return call(request, **options)

    def stream(self, requests: Iterator[Any], **options: Any) -> Any:
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            lambda m: m.SerializeToString(),
            method_messages("ModelStreamInfer")[1].FromString,
        )
        return call(requests, **options)

    def raw(self, path: str, data: bytes) -> bytes:
        return bytes(self.channel.unary_unary(path)(data, timeout=20))


def outgoing(messages: list[Any]) -> Iterator[Any]:
    """Yield the messages of a recorded stream. A number among them is a pause, shortened here."""
    for item in messages:
        if isinstance(item, dict):
            yield message("ModelStreamInfer", item)
        else:
            time.sleep(min(item, 0.05))


def case_named(name: str) -> dict[str, Any]:
    return next(case for case in CASES if case["case"] == name)


def send(client: Client, case: dict[str, Any]) -> Any:
    request = case["request"]
    if request["rpc"] is None:
        data = client.raw(request["raw_method"], base64.b64decode(request["message"]["raw_b64"]))
        return {"raw_b64": base64.b64encode(data).decode()}
    options = {
        "timeout": request.get("timeout_s", 20),
        "compression": COMPRESSION[request.get("compression")],
    }
    options["metadata"] = [tuple(pair) for pair in request.get("metadata", [])]
    return document(
        client.unary(request["rpc"], message(request["rpc"], request["message"]), **options)
    )


def answers(client: Client, case: dict[str, Any]) -> list[dict[str, Any]]:
    compression = COMPRESSION[case["request"].get("compression")]
    call = client.stream(outgoing(case["request"]["messages"]), timeout=20, compression=compression)
    found = [document(response) for response in call]
    assert call.code().name == case["response"]["code"]
    return found


def check_failure(client: Client, name: str) -> None:
    expected = case_named(name)["response"]
    with pytest.raises(grpc.RpcError) as raised:
        send(client, case_named(name))
    assert (raised.value.code().name, raised.value.details()) == (
        expected["code"],
        expected["details"],
    )


def comparable(name: str, found: dict[str, Any]) -> dict[str, Any]:
    if name == "grpc-infer-params":  # the order of parameters is arbitrary
        text = json.loads(base64.b64decode(found["raw_output_contents"][0])[4:])
        contents = [{**text, "params": json.loads(text["params"])}]
        return {**found, "raw_output_contents": contents}
    return found
