"""The three services of a server: HTTP, gRPC and metrics. Importing this loads the web stack."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from slipstream.repository.reading import Reading
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.http.routes import create_app, uvicorn_config
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.metrics.latency_metrics import MetricsConfig
from slipstream.server.metrics.metrics import ServerMetrics, metrics_app
from slipstream.server.model_factories import ModelFactory
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.response_cache import ResponseCache
from slipstream.server.options import ServerOptions
from slipstream.server.tracing.settings import TraceSettings

logger = logging.getLogger(__name__)

# Answers that are complete need this long at most to reach their readers.
CLOSE_SECONDS = 5.0


class Services:
    def __init__(
        self,
        options: ServerOptions,
        engines: EnginePool,
        state: ServerState,
        factories: Sequence[ModelFactory],
    ) -> None:
        self._options = options
        self._engines = engines
        self.metrics = ServerMetrics(config=MetricsConfig(**options.metrics_settings))
        self.registry = ModelRegistry()
        if options.response_cache_bytes:
            self.registry.wrap(ResponseCache(options.response_cache_bytes).wrap)
        self.registry.wrap(self.metrics.count)
        trace = self._trace = TraceSettings(options.trace_settings, options.trace_export)
        if trace.exporter is not None:
            self.metrics.add_source(trace.exporter.families)
        self.loader = ModelLoader(
            options.repositories,
            self.registry,
            engines,
            factories,
            options.control_mode,
            options.exit_timeout_seconds,
            lambda name: self._forget(name, trace),
        )
        if options.strict_readiness:
            state.models_ready = lambda: self.loader.models_ready
        engines.on_change = self._watch_engines
        context = _context(options, self.loader, trace)
        self._memory = context.memory
        self._http = _WebServer(create_app(self.registry, state, context))
        self._metrics = _WebServer(metrics_app(self.metrics))
        self._grpc_options = GrpcOptions(**options.grpc_settings)
        self._grpc = create_grpc_server(self.registry, state, context, self._grpc_options)
        self._connect(factories)

    def _connect(self, factories: Sequence[ModelFactory]) -> None:
        """Models of a factory may load models themselves, and bring metrics of their own."""
        for factory in factories:
            if hasattr(factory, "control"):
                factory.control = self.loader
            families = getattr(getattr(factory, "metrics", None), "families", None)
            if families is not None:
                self.metrics.add_source(families)

    def _forget(self, name: str, trace: TraceSettings) -> None:
        """A model is gone: what was set for it and counted of it goes too."""
        trace.forget(name)
        self.metrics.forget(name)

    def _watch_engines(self) -> None:
        for name, engine in self._engines.items():
            versions = [entry.version for entry in self.registry if entry.name == name]
            self.metrics.watch_engine(name, engine, versions[-1] if versions else "1")

    async def load(self, names: Sequence[str], reading: Reading) -> dict[str, str]:
        return await self.loader.load_all(names, reading)

    async def open(self, http: socket.socket | None, metrics: socket.socket | None) -> None:
        """Listen, and say so as Triton does, each service once it really does."""
        if self._options.grpc.open:
            place = await self._open_grpc()
            _log_start("GRPCInferenceService", place, "grpc_server.cc:2463")
        if http is not None:
            await self._http.open(http)
            _log_start("HTTPService", _place(http), "http_server.cc:4692")
        if metrics is not None:
            await self._metrics.open(metrics)
            _log_start("Metrics Service", _place(metrics), "http_server.cc:362")

    async def _open_grpc(self) -> str:
        address, port = self._options.grpc.address, self._options.grpc.number
        host = f"[{address}]" if ":" in address else address
        try:
            port = add_port(self._grpc, f"{host}:{port}", self._grpc_options)
        except RuntimeError as error:
            raise OSError(
                f"gRPC cannot listen at {host}:{port}; choose another port with --grpc-port"
            ) from error
        await self._grpc.start()
        return f"{host}:{port}"

    async def close(self) -> None:
        """Stop listening; answers that are on their way arrive."""
        await asyncio.gather(
            self._grpc.stop(CLOSE_SECONDS), self._http.close(), self._metrics.close()
        )
        await self.loader.close()
        self._memory.close()
        await asyncio.to_thread(self._trace.close)


def _context(options: ServerOptions, loader: ModelLoader, trace: TraceSettings) -> ServerContext:
    return ServerContext(
        control=loader,
        memory=SharedMemory(options.allow_client_shared_memory),
        trace=trace,
        access=options.access,
        server_name=options.server_name,
        http_max_input_bytes=options.http_max_input_bytes,
        http_forwarded_headers=options.http_forwarded_headers,
        grpc_forwarded_headers=options.grpc_forwarded_headers,
    )


def _log_start(service: str, address: str, place: str) -> None:
    logger.info("Started %s at %s", service, address, extra={"place": place})


def _place(listening: socket.socket) -> str:
    address, port = listening.getsockname()[:2]
    return f"{address}:{port}"


class _WebServer(uvicorn.Server):
    """One listening port. Signals belong to the lifecycle, so uvicorn's own handling of them is
    off.
    """

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
