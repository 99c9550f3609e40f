"""The three services of a server: HTTP, gRPC and metrics. Importing this imports their modules."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

from slipstream.repository.reading import Reading
from slipstream.server.anthropic.routes import AnthropicRoutes
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_grpc_server
from slipstream.server.http.health_probes import HealthProbes
from slipstream.server.http.routes import HttpRoutes
from slipstream.server.http.server import HttpServer
from slipstream.server.http.server_info import ServerInfo, serve_metrics
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.metrics.optional_metrics import MetricsConfig
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory
from slipstream.server.models.response_cache import ResponseCache
from slipstream.server.openai.routes import OpenAIRoutes
from slipstream.server.options import ServerOptions
from slipstream.server.tracing.settings import TraceSettings

logger = logging.getLogger(__name__)

# The time in which clients can read the responses that are complete when the server stops.
CLOSE_SECONDS = 5.0


def create_context(**settings: Any) -> ServerContext:
    """Return a context with default trace settings. `settings`: its other fields."""
    return ServerContext(**{"trace": TraceSettings(), **settings})


def create_app(
    registry: ModelRegistry,
    state: ServerState,
    context: ServerContext | None = None,
    metrics: ServerMetrics | None = None,
) -> HttpRoutes:
    """Return the handler of the HTTP port, with Triton's, OpenAI's and Anthropic's routes.

    Without a context the models are fixed and no key is needed. `metrics`: those that the HTTP port
    serves.
    """
    context = context or create_context()
    anthropic = AnthropicRoutes(registry, state, context)
    openai = OpenAIRoutes(registry, state, context)
    probes = HealthProbes(registry, state)
    info = ServerInfo(state, metrics)
    groups = [anthropic.group(), openai.group(), probes.group(), info.group()]
    return HttpRoutes(registry, state, context, groups)


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
            self.metrics.watch_span_export(trace.exporter)
        self.loader = ModelLoader(
            options.repositories,
            self.registry,
            engines,
            factories,
            options.control_mode,
            options.exit_timeout_seconds,
            lambda name: self._forget(name, trace),
            options.chat,
        )
        if options.strict_readiness:
            state.models_ready = lambda: self.loader.models_ready
        engines.on_change = self._watch_engines
        context = _context(options, self.loader, trace)
        self._memory = context.memory
        http_metrics = self.metrics if options.http_metrics else None
        self._http = HttpServer(create_app(self.registry, state, context, http_metrics))
        self._metrics = HttpServer(serve_metrics(self.metrics))
        self._grpc_options = GrpcOptions(**options.grpc_settings)
        self._grpc = create_grpc_server(self.registry, state, context, self._grpc_options)
        self._connect(factories)

    def _connect(self, factories: Sequence[ModelFactory]) -> None:
        """Give repository control to the factories whose models use it, and add their metrics."""
        for factory in factories:
            factory.control = self.loader
            self.metrics.add_source(factory.metric_families)

    def _forget(self, name: str, trace: TraceSettings) -> None:
        """Drop the trace settings and the counters of a model that was removed."""
        trace.forget(name)
        self.metrics.forget(name)

    def _watch_engines(self) -> None:
        for name, engine in self._engines.items():
            versions = [entry.version for entry in self.registry if entry.name == name]
            self.metrics.watch_engine(name, engine, versions[-1] if versions else "1")

    async def load(self, names: Sequence[str], reading: Reading) -> dict[str, str]:
        return await self.loader.load_all(names, reading)

    async def open(self, http: socket.socket | None, metrics: socket.socket | None) -> None:
        """Listen, and log each service as Triton does once it listens."""
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
        address = self._options.grpc.address
        port = self._options.grpc.number
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
        """Stop listening. Responses that are being sent are given time to end."""
        await asyncio.gather(
            self._grpc.stop(CLOSE_SECONDS),
            self._http.close(CLOSE_SECONDS),
            self._metrics.close(CLOSE_SECONDS),
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
        embedding_pooling=options.embedding_pooling,
        http_forwarded_headers=options.http_forwarded_headers,
        grpc_forwarded_headers=options.grpc_forwarded_headers,
    )


def _log_start(service: str, address: str, place: str) -> None:
    logger.info("Started %s at %s", service, address, extra={"place": place})


def _place(listening: socket.socket) -> str:
    address, port = listening.getsockname()[:2]
    return f"{address}:{port}"
