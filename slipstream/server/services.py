"""The three services of a server: HTTP, gRPC and metrics. Importing this loads the web stack."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any, cast

import grpc
import uvicorn

from slipstream.repository.models import EngineModel, Repository
from slipstream.server import logging
from slipstream.server.engine_client import EngineClient
from slipstream.server.grpc_service import create_grpc_server
from slipstream.server.health import ServerState
from slipstream.server.http import create_app, uvicorn_config
from slipstream.server.llm_models import Generator
from slipstream.server.metrics import CountedModel, ServerMetrics, metrics_app
from slipstream.server.registry import build_registry
from slipstream.server.text.pipeline import TextGenerator
from slipstream.server.text.tokenizer import Tokenizer

# Answers that are complete need this long at most to reach their readers.
CLOSE_SECONDS = 5.0


class Services:
    def __init__(
        self,
        address: str,
        repository: Repository,
        engines: Mapping[str, EngineClient],
        state: ServerState,
    ) -> None:
        self._address = address
        self.metrics = ServerMetrics()
        for name, engine in engines.items():
            self.metrics.watch_engine(name, engine, str(repository.models[name].versions[-1]))
        generators = {name: _generator(model, engines[name]) for name, model in repository.engines.items()}
        registry = build_registry(repository, generators)
        registry.wrap(lambda entry: CountedModel(entry.model, self.metrics.model(entry.name, entry.version)))
        self._http = _WebServer(create_app(registry, state))
        self._metrics = _WebServer(metrics_app(self.metrics))
        self._grpc: grpc.aio.Server = create_grpc_server(registry, state)

    async def open(self, http: socket.socket, metrics: socket.socket, grpc_port: int) -> None:
        """Listen, and say so as Triton does, each service once it really does."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        try:
            grpc_port = self._grpc.add_insecure_port(f"{host}:{grpc_port}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen at {host}:{grpc_port}; choose another port with --grpc-port") from error
        await self._grpc.start()
        logging.info(f"Started GRPCInferenceService at {host}:{grpc_port}", "grpc_server.cc:2463")
        await self._http.open(http)
        logging.info(f"Started HTTPService at {_place(http)}", "http_server.cc:4692")
        await self._metrics.open(metrics)
        logging.info(f"Started Metrics Service at {_place(metrics)}", "http_server.cc:362")

    async def close(self) -> None:
        """Stop listening; answers that are on their way arrive."""
        await asyncio.gather(self._grpc.stop(CLOSE_SECONDS), self._http.close(), self._metrics.close())


def _generator(model: EngineModel, engine: EngineClient) -> Generator:
    # Its type does not say that its engine knows whether it is ready; this one does.
    return cast(Generator, TextGenerator(Tokenizer.load(model.tokenizer_folder), engine))


def _place(listening: socket.socket) -> str:
    address, port = listening.getsockname()[:2]
    return f"{address}:{port}"


class _WebServer(uvicorn.Server):
    """One listening port. Signals belong to the lifecycle, so uvicorn's own handling of them is off."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn_config(app, timeout_graceful_shutdown=int(CLOSE_SECONDS)))
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def open(self, listening: socket.socket) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[listening]))
        while not self.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.should_exit = True
        if self._task is not None:
            await self._task
