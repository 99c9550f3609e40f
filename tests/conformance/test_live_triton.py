"""A real Triton and this server answer the same HTTP requests to the same Python models alike.

Needs a Triton, from `pip install nvidia-pytriton` or TRITONSERVER=/path/to/tritonserver, and
`-m slow`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compared import ask, requests
from http_support import RunningServer
from real_triton import RealTriton, find_tritonserver

from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.python_models.factory import PythonModels
from slipstream.server.services import create_app, create_context

MODELS = Path(__file__).parents[1] / "python_models" / "repos" / "mimic"
TRITONSERVER = find_tritonserver()
pytestmark = pytest.mark.live

# Deliberate differences and their reasons. The requests are still sent.
DIFFERENT: dict[str, str] = {
    "route-bogus-method": "the HTTP parser refuses the method FOO and closes the connection, instead of 405",
    "route-404-openai": "OpenAI's routes are served here, and this one accepts only POST",
    "route-http10": "the answer has Content-Length: 0, which Triton omits for HTTP/1.0",
    "compress-infer-req-bad": "a body that is not valid gzip is refused, and not read as a tensor",
    **dict.fromkeys(
        (
            "shm-register",
            "shm-register-dup",
            "shm-register-missing",
            "shm-register-out",
            "shm-register-triton",
        ),
        "shared memory of the machine is off unless a flag allows it",
    ),
    "route-http10-keepalive": "HTTP/1.0 connections are closed after the answer, even with keep-alive",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a copy with version folders, which Triton requires for ensembles, too."""
    folder = tmp_path_factory.mktemp("live") / "models"
    shutil.copytree(MODELS, folder)
    (folder / "ens" / "1").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        # file that two of the models need
        patch.setenv("SLOW_MODEL_LOG", str(folder.parent / "slow-model.log"))
        yield folder


@pytest.fixture(scope="module")
def real(repository: Path) -> Iterator[int]:
    assert TRITONSERVER is not None
    with RealTriton(TRITONSERVER, repository, repository.parent, "--id=oracle-mimic") as server:
        yield server.http_port


@pytest.fixture(scope="module")
def ours(repository: Path) -> Iterator[int]:
    registry = ModelRegistry()
    registry.wrap(ServerMetrics().count)
    pool = EnginePool({}, Supervision(), ENGINE_COMMAND)
    opened: list[ModelLoader] = []

    async def load() -> None:
        opened.append(ModelLoader([repository], registry, pool, [PythonModels()]))
        context.control = opened[0]
        reading = opened[0].read()
        failed = await opened[0].load_all(reading.repository.models, reading)
        assert failed == {}

    context = create_context(server_name="oracle-mimic")
    with RunningServer(create_app(registry, ServerState([]), context)) as server:
        assert server.loop is not None
        asyncio.run_coroutine_threadsafe(load(), server.loop).result(120)
        yield server.port
        asyncio.run_coroutine_threadsafe(opened[0].close(), server.loop).result(120)


@pytest.mark.parametrize("case", requests(), ids=lambda case: case["case"])
def test_both_servers_answer_alike(real: int, ours: int, case: dict[str, Any]) -> None:
    expected = ask(real, case["request"])
    found = ask(ours, case["request"])
    if case["case"] in DIFFERENT:
        assert found != expected, "this difference no longer exists: remove it from the list"
    else:
        assert found == expected
