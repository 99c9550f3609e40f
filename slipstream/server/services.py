"""The three services of a server: HTTP, gRPC and metrics. Importing this imports their modules."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterator, Sequence

from slipstream.repository.reading import Reading
from slipstream.server.engine_link.pool import EnginePool
from slipstream.server.frontends.app import create_app, create_context
from slipstream.server.frontends.forwarded_calls import ForwardedCalls
from slipstream.server.frontends.messages import FrontendOptions
from slipstream.server.frontends.ports import Ports
from slipstream.server.frontends.primary import Frontends, LinkedModel, ServerView
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_handlers
from slipstream.server.grpc.transport import create_server
from slipstream.server.http.server import HttpServer
from slipstream.server.http.server_info import serve_metrics
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.metrics.optional_metrics import MetricsConfig
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.model_loader import ModelLoader
from slipstream.server.models.factories import ModelFactory
from slipstream.server.models.response_cache import ResponseCache
from slipstream.server.options import ServerOptions
from slipstream.server.tracing.settings import TraceSettings

__all__ = ["Services", "create_app", "create_context", "frontend_options"]

logger = logging.getLogger(__name__)

# The time in which clients can read the responses that are complete when the server stops.
CLOSE_SECONDS = 5.0


def frontend_options(options: ServerOptions, grpc_number: int) -> FrontendOptions:
    """Return what secondary front ends must know."""
    access = options.access
    return FrontendOptions(
        api_key=access.api_key,
        admin_key=access.admin_key,
        http_restrictions=dict(access.http_restrictions),
        grpc_restrictions=dict(access.grpc_restrictions),
        health_needs_key=access.health_needs_key,
        origin_policy=options.origin_policy,
        http_certificate=options.http_certificate,
        server_name=options.server_name,
        http_max_input_bytes=options.http_max_input_bytes,
        embedding_pooling=options.embedding_pooling,
        http_forwarded_headers=_pattern_text(options.http_forwarded_headers),
        grpc_forwarded_headers=_pattern_text(options.grpc_forwarded_headers),
        grpc_settings=dict(options.grpc_settings),
        grpc_address=_grpc_address(options.grpc.address, grpc_number) if options.grpc.open else "",
        metrics_settings=dict(options.metrics_settings),
        chat_template_folder=options.chat.template_folder,
        tool_call_parser=options.chat.tool_call_parser,
        reasoning_parser=options.chat.reasoning_parser,
    )


def _pattern_text(pattern: re.Pattern[str] | None) -> str | None:
    return None if pattern is None else pattern.pattern


def _grpc_address(address: str, number: int) -> str:
    return f"[{address}]:{number}" if ":" in address else f"{address}:{number}"


class Services:
    def __init__(
        self,
        options: ServerOptions,
        engines: EnginePool,
        state: ServerState,
        factories: Sequence[ModelFactory],
        frontends: Frontends | None = None,
    ) -> None:
        self._options = options
        self._engines = engines
        self._state = state
        self._frontends = frontends
        self._listening = False  # all models are loaded
        self.metrics = ServerMetrics(config=MetricsConfig(**options.metrics_settings))
        self.registry = ModelRegistry()
        self._wrap_models()
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
        shown = self.metrics if options.http_metrics else None
        app = create_app(self.registry, state, context, shown, self.metrics)
        self._http = HttpServer(app, certificate=options.http_certificate)
        self._metrics = HttpServer(
            serve_metrics(self.metrics, state, options.metrics_origin_policy)
        )
        self._grpc_options = GrpcOptions(**options.grpc_settings, share_port=frontends is not None)
        handlers = create_handlers(self.registry, state, context)
        self._calls = ForwardedCalls(handlers)
        self._grpc = create_server(
            handlers, self._grpc_options.channel_arguments(), self._grpc_options.transport
        )
        self._connect(factories)
        if frontends is not None:
            self._share(frontends, context)

    def _wrap_models(self) -> None:
        """Count the requests of all models. Answer some of them from the cache."""
        if self._options.response_cache_bytes:
            self.registry.wrap(ResponseCache(self._options.response_cache_bytes).wrap)
        if self._frontends is not None:
            self.registry.wrap(self._frontends.wrap)
        self.registry.wrap(self.metrics.count)

    def _share(self, frontends: Frontends, context: ServerContext) -> None:
        """Connect the front ends: the others follow this one, which gets their counts."""
        context.settle = frontends.settle
        context.collect_statistics = frontends.collect
        self.loader.after_change = frontends.settle
        self.loader.before_unload = frontends.collect
        self._state.outstanding_elsewhere = lambda: frontends.outstanding

    async def attach_frontends(self) -> None:
        """Begin to exchange messages with the other front ends."""
        if self._frontends is not None:
            view = ServerView(
                self._linked_models,
                lambda: self._listening,
                lambda: self._state.draining,
                lambda: self._trace.active,
            )
            await self._frontends.attach(view, self.metrics, self._http, self._calls)

    def _linked_models(self) -> Iterator[LinkedModel]:
        """Return the models that other front ends serve, too."""
        for loaded in self.loader.loaded:
            if loaded.recipe is not None and loaded.recipe.kind != "graph":
                yield LinkedModel(
                    loaded.recipe, loaded.model.versions, loaded.engines, loaded.number
                )

    async def settle(self) -> None:
        """Return when the other front ends follow this one."""
        if self._frontends is not None:
            await self._frontends.settle()

    async def wait_drained(self) -> None:
        """Wait for the requests of the other front ends."""
        if self._frontends is not None:
            await self._frontends.wait_drained()

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

    async def open(self, ports: Ports) -> None:
        """Listen, and log each service as Triton does once it listens."""
        self._listening = True
        await self.settle()  # the other front ends listen
        if self._options.grpc.open:
            place = await self._open_grpc(ports.grpc_number)
            _log_start("GRPCInferenceService", place, "grpc_server.cc:2463")
        if ports.http is not None:
            await self._http.open(ports.http)
            _log_start("HTTPService", _place(ports.http), "http_server.cc:4692")
        if ports.metrics is not None:
            await self._metrics.open(ports.metrics)
            _log_start("Metrics Service", _place(ports.metrics), "http_server.cc:362")

    async def _open_grpc(self, number: int) -> str:
        address = self._options.grpc.address
        place = _grpc_address(address, number)
        try:
            number = add_port(self._grpc, place, self._grpc_options)
        except RuntimeError as error:
            raise OSError(
                f"gRPC cannot listen at {place}; choose another port with --grpc-port"
            ) from error
        await self._grpc.start()
        return _grpc_address(address, number)

    async def close(self, most_seconds: float = CLOSE_SECONDS) -> None:
        """Stop listening. Responses that are being sent are given time to end."""
        seconds = min(most_seconds, CLOSE_SECONDS)
        if self._frontends is not None:
            await self._frontends.close(seconds)
        await asyncio.gather(
            self._grpc.stop(seconds),
            self._http.close(seconds),
            self._metrics.close(seconds),
        )
        try:
            async with asyncio.timeout(most_seconds):
                await self.loader.close()
        except TimeoutError:
            logger.warning("models do not end within %.1f s and are given up", most_seconds)
        self._memory.close()
        await asyncio.to_thread(self._trace.close)


def _context(options: ServerOptions, loader: ModelLoader, trace: TraceSettings) -> ServerContext:
    return ServerContext(
        control=loader,
        memory=SharedMemory(options.allow_client_shared_memory),
        trace=trace,
        access=options.access,
        origin_policy=options.origin_policy,
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
