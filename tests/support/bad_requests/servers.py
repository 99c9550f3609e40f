"""The two servers that answer generated requests, on the same repository."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from http_support import RunningServer
from real_triton import RealTriton

from bad_requests.recordings import CRASH, Answer
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory
from slipstream.server.services import create_app, create_context

_MODELS = Path(__file__).parents[2] / "python_models" / "repos" / "mimic"
_SLOW = ("slow", "slow_nd", "llm_slow", "llm_bls")
_NAME = "generated"
# Answers that may mean that the real server has ended.
_DOUBTFUL = ("closed", "no answer", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")

CaseT = TypeVar("CaseT", contravariant=True)


class Sender(Protocol[CaseT]):
    def send(self, case: CaseT) -> Answer: ...

    def close(self) -> None: ...


def write_repository(folder: Path) -> Path:
    """Write the models of the recordings without the slow ones, and `spare`, for loads."""
    shutil.copytree(_MODELS, folder, ignore=shutil.ignore_patterns(*_SLOW))
    (folder / "ens" / "1").mkdir(exist_ok=True)  # Triton requires it for ensembles, too
    shutil.copytree(_MODELS / "raw1", folder / "spare")
    config = folder / "spare" / "config.pbtxt"
    config.write_text(config.read_text().replace("raw1", "spare"))
    return folder


class Ports(NamedTuple):
    http: int
    grpc: int


@contextmanager
def our_server(repository: Path, factories: Sequence[ModelFactory]) -> Iterator[Ports]:
    """Serve a repository with all models loaded, over both protocols."""
    registry = ModelRegistry()
    registry.wrap(ServerMetrics().count)
    pool = EnginePool({}, Supervision(), ())
    loader = ModelLoader([repository], registry, pool, factories, "explicit")
    context = create_context(server_name=_NAME, control=loader, memory=SharedMemory(allowed=True))
    state = ServerState([])

    async def start() -> int:
        reading = loader.read()
        assert await loader.load_all(reading.repository.models, reading) == {}
        server = create_grpc_server(registry, state, context)
        grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stops.append(server.stop)
        return grpc_port

    async def stop() -> None:
        await stops[0](None)
        await loader.close()

    stops: list[Callable[[float | None], object]] = []
    with RunningServer(create_app(registry, state, context)) as server:
        assert server.loop is not None
        grpc_port = asyncio.run_coroutine_threadsafe(start(), server.loop).result(120)
        yield Ports(server.port, grpc_port)
        asyncio.run_coroutine_threadsafe(stop(), server.loop).result(120)


class RealAnswers:
    """Answers of a real server, which is started again where a request ends it."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._repository = write_repository(folder / "models")
        self._starts = 0

    def _start(self) -> RealTriton:
        self._starts += 1
        folder = self._folder / str(self._starts)
        folder.mkdir()
        os.environ["SLOW_MODEL_LOG"] = str(folder / "slow.log")
        options = (f"--id={_NAME}", "--model-control-mode=explicit", "--load-model=*")
        return RealTriton(self._binary, self._repository, folder, *options).__enter__()

    def send_all(
        self, cases: Sequence[CaseT], connect: Callable[[RealTriton], Sender[CaseT]]
    ) -> list[Answer]:
        server = self._start()
        sender = connect(server)
        answers: list[Answer] = []
        try:
            for case in cases:
                answer = sender.send(case)
                if answer[0] in _DOUBTFUL and not _is_alive(server):
                    answer = (CRASH,) + ("",) * (len(answer) - 1)
                    sender.close()
                    server.__exit__()
                    server = self._start()
                    sender = connect(server)
                answers.append(answer)
        finally:
            sender.close()
            server.__exit__()
        return answers


def _is_alive(server: RealTriton) -> bool:
    """Return whether the server still answers: it takes a moment to end."""
    time.sleep(0.5)
    return server.is_ready()
