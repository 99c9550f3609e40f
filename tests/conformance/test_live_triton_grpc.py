"""A real Triton and this server answer every recorded gRPC call and stream alike.

Needs a Triton; see `test_live_triton.py`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_support import (
    CASES,
    COMPRESSION,
    Client,
    RunningGrpc,
    comparable,
    document,
    outgoing,
    send,
)
from real_triton import RealTriton, find_tritonserver

from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.services import create_context

MODELS = Path(__file__).parents[1] / "python_models" / "repos" / "mimic"
TRITONSERVER = find_tritonserver()
pytestmark = pytest.mark.live
_PLACE = re.compile(r"(?<=At:\n  )[^()]*/(?=\w+/\d+/model\.py)")  # folder of the machine in a path
_CHANGING = ("ns", "count", "last_inference", "inference_count", "execution_count")
# Deliberate differences and their reasons. The calls are still sent.
DIFFERENT: dict[str, str] = {
    "grpc-reflection": "reflection is served here; Triton's build has none",
    "grpc-shm-register-missing": "shared memory of the machine is off unless a flag allows it",
}
RECORDED = [
    case for case in CASES if case["server"] == "mimic" and case["proto"] in ("grpc", "grpc-stream")
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("live") / "models"
    shutil.copytree(MODELS, folder)
    (folder / "ens" / "1").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_MODEL_LOG", str(folder.parent / "slow-model.log"))
        yield folder


@pytest.fixture(scope="module")
def real(repository: Path) -> Iterator[Client]:
    assert TRITONSERVER is not None
    with (
        RealTriton(TRITONSERVER, repository, repository.parent, "--id=oracle-mimic") as server,
        Client(server.grpc_port) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ours(repository: Path) -> Iterator[Client]:
    registry = ModelRegistry()
    registry.wrap(ServerMetrics().count)
    pool = EnginePool({}, Supervision(), ENGINE_COMMAND)
    loader = ModelLoader([repository], registry, pool, [PythonModels()])

    async def load() -> None:
        reading = loader.read()
        assert await loader.load_all(reading.repository.models, reading) == {}

    context = create_context(server_name="oracle-mimic", control=loader)
    with RunningGrpc(registry, ServerState([]), context) as server, Client(server.port) as client:
        asyncio.run_coroutine_threadsafe(load(), server.loop).result(120)
        yield client
        asyncio.run_coroutine_threadsafe(loader.close(), server.loop).result(120)


def outcome(client: Client, case: dict[str, Any]) -> Any:
    """Return the messages, or the code and text of an error, without values that vary."""
    try:
        if case["proto"] == "grpc":
            return "OK", comparable(case["case"], masked(send(client, case)))
        compression = COMPRESSION[case["request"].get("compression")]
        call = client.stream(
            outgoing(case["request"]["messages"]), timeout=20, compression=compression
        )
        answers = [masked(document(answer)) for answer in call]
        # Requests of one stream are answered concurrently, so only the order within each of them is
        # the same.
        return "OK", sorted(
            answers, key=lambda answer: answer.get("infer_response", {}).get("id", "")
        )
    except grpc.RpcError as error:
        return error.code().name, _PLACE.sub("", error.details() or "")


def masked(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: masked(value) for name, value in found.items() if name not in _CHANGING}
    if isinstance(found, list):
        return [masked(value) for value in found]
    return _PLACE.sub("", found) if isinstance(found, str) else found


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["case"])
def test_both_servers_answer_alike(real: Client, ours: Client, case: dict[str, Any]) -> None:
    expected = outcome(real, case)
    found = outcome(ours, case)
    if case["case"] in DIFFERENT:
        assert found != expected, "this difference no longer exists: remove it from the list"
    else:
        assert found == expected
