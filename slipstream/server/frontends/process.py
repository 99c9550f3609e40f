"""A secondary front end: `python -m slipstream.server.frontends.process ORDER`. The primary front
end starts and watches it.

ORDER is the JSON form of `messages.StartOrder`. Options, models and engines come over the control
socket. The ports listen once the models are served.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from slipstream.server.frontends import messages
from slipstream.server.frontends.app import create_app
from slipstream.server.frontends.frames import FrameStream
from slipstream.server.frontends.grpc_forwarding import GrpcForwarder, secondary_handlers
from slipstream.server.frontends.http_forwarding import FrontendRoutes, HttpForwarder
from slipstream.server.frontends.in_flight import InFlightTable
from slipstream.server.frontends.local_models import LocalModels, LocalRegistry, PrimaryMemory
from slipstream.server.frontends.upstream import Upstream
from slipstream.server.grpc.infer import Inference
from slipstream.server.grpc.options import GrpcOptions, add_port
from slipstream.server.grpc.service import create_handlers
from slipstream.server.grpc.transport import create_server
from slipstream.server.http.server import HttpServer
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.log.capture import capture_python_reports
from slipstream.server.log.formats import RELAYED
from slipstream.server.log.output import LogSettings, configure_log
from slipstream.server.log.parent_death import die_with
from slipstream.server.metrics.optional_metrics import MetricsConfig
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.models.token_model import TokenModel
from slipstream.server.text.chat import ChatOptions
from slipstream.server.tracing.settings import TraceSettings

logger = logging.getLogger("slipstream.server.frontends.process")

COUNT_SECONDS = 0.1  # interval at which increments of the statistics are sent
ALIVE_SECONDS = 1.0  # longest time without a message to the primary front end
_CERTIFICATES = ("server_certificate", "server_key", "root_certificate")


class SecondaryFrontend:
    def __init__(
        self, order: messages.StartOrder, options: messages.FrontendOptions, control: FrameStream
    ) -> None:
        self._order = order
        self._options = options
        self._control = control
        self._opened = False
        self.metrics = ServerMetrics(config=_metrics_config(options))
        self._registry = LocalRegistry()
        table = InFlightTable(order.frontends, order.counts)
        self._models = LocalModels(
            self._registry, self.metrics, _chat_options(options), order.index, table
        )
        self._state = ServerState(self._models)
        context = _context(options)
        upstream = Upstream(socket.socket(fileno=order.upstream))
        app = create_app(self._registry, self._state, context)
        forwarder = HttpForwarder(upstream, options.http_max_input_bytes)
        self._routes = FrontendRoutes(app, forwarder)
        self._http = HttpServer(self._routes, certificate=options.http_certificate)
        self._grpc_options = _grpc_options(options)
        handlers = secondary_handlers(
            create_handlers(self._registry, self._state, context),
            Inference(self._registry, self._state, context),
            context.access,
            GrpcForwarder(upstream, order.index),
            lambda: self._routes.forward_all,
        )
        self._grpc = create_server(
            handlers, self._grpc_options.channel_arguments(), self._grpc_options.transport
        )

    async def run(self) -> int:
        """Serve until the primary front end says otherwise or ends. Return the exit code."""
        counting = asyncio.ensure_future(self._count())
        try:
            while (frame := await self._control.read()) is not None:
                message = messages.decode(frame.kind, frame.content, messages.TO_SECONDARY)
                if isinstance(message, messages.Close):
                    await self._close(message.seconds)
                    return 0
                await self._apply(message)
        finally:
            counting.cancel()
        return 1

    async def _apply(
        self,
        message: messages.Follow | messages.Collect | messages.StopRequests | messages.Configure,
    ) -> None:
        if isinstance(message, messages.Follow):
            await self._follow(message)
        elif isinstance(message, messages.Collect):
            self._send_counts()
            self._send(messages.Collected(message.number))
        elif isinstance(message, messages.StopRequests):
            self._stop(message)

    async def _follow(self, state: messages.Follow) -> None:
        _follow_log(state.log)
        # A request that has begun here ends here, also where tracing begins meanwhile.
        self._routes.forward_all = state.tracing
        self._state.draining = state.draining
        if state.draining:
            self._models.begin_drain()
        self._send_counts()  # before the counters of unloaded models are dropped
        await self._models.follow(state.engines, state.models, state.draining)
        if state.listening and not self._opened:
            await self._open()
        self._send(messages.Followed(state.number))

    async def _open(self) -> None:
        self._opened = True
        if self._options.grpc_address:
            add_port(self._grpc, self._options.grpc_address, self._grpc_options)
            await self._grpc.start()
        if self._order.http >= 0:
            await self._http.open(socket.socket(fileno=self._order.http))

    def _stop(self, message: messages.StopRequests) -> None:
        for entry in self._registry:
            model = entry.model.unwrapped
            if entry.name == message.model and isinstance(model, TokenModel):
                model.stops.stop_id(message.request_id)

    async def _count(self) -> None:
        silent_seconds = 0.0
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            silent_seconds += COUNT_SECONDS
            if self._send_counts():
                silent_seconds = 0.0
            elif silent_seconds >= ALIVE_SECONDS:
                self._send(messages.Counted([]))  # the primary front end kills a silent process
                silent_seconds = 0.0

    def _send_counts(self) -> bool:
        """Send the counts since the last time; return whether there were any."""
        increments = self.metrics.take_increments()
        if increments:
            self._send(messages.Counted(increments))
        return bool(increments)

    def _send(self, message: messages.FromSecondary) -> None:
        self._control.write(*messages.encode(message))

    async def _close(self, seconds: float) -> None:
        await asyncio.gather(self._grpc.stop(seconds), self._http.close(seconds))
        self._send_counts()
        await self._control.drain()


def _metrics_config(options: messages.FrontendOptions) -> MetricsConfig:
    settings = dict(options.metrics_settings)
    if "summary_quantiles" in settings:
        settings["summary_quantiles"] = tuple(settings["summary_quantiles"])
    return MetricsConfig(**settings)


def _chat_options(options: messages.FrontendOptions) -> ChatOptions:
    return ChatOptions(
        options.chat_template_folder, options.tool_call_parser, options.reasoning_parser
    )


def _grpc_options(options: messages.FrontendOptions) -> GrpcOptions:
    paths = {
        name: Path(value)
        for name, value in options.grpc_settings.items()
        if name in _CERTIFICATES and value is not None
    }
    return GrpcOptions(**{**options.grpc_settings, **paths, "share_port": True})


def _context(options: messages.FrontendOptions) -> ServerContext:
    return ServerContext(
        trace=TraceSettings(),
        memory=PrimaryMemory(),
        access=Access(
            options.api_key,
            options.admin_key,
            options.http_restrictions,
            options.grpc_restrictions,
            options.health_needs_key,
        ),
        origin_policy=options.origin_policy,
        server_name=options.server_name,
        http_max_input_bytes=options.http_max_input_bytes,
        embedding_pooling=options.embedding_pooling,
        http_forwarded_headers=messages.compile_pattern(options.http_forwarded_headers),
        grpc_forwarded_headers=messages.compile_pattern(options.grpc_forwarded_headers),
    )


def _follow_log(settings: LogSettings) -> None:
    """Write the levels that the primary front end writes. It has the file and the format."""
    configure_log(
        info=settings.info,
        warning=settings.warning,
        error=settings.error,
        verbose_level=settings.verbose_level,
    )


def _log_format() -> str:
    # Without a terminal the standard error stream is the primary front end's pipe.
    return "default" if sys.stderr.isatty() else RELAYED


async def serve(order: messages.StartOrder) -> int:
    streams = await asyncio.open_unix_connection(sock=socket.socket(fileno=order.control))
    control = FrameStream(*streams)
    first = await control.read()
    if first is None:
        return 1
    configure = messages.decode(first.kind, first.content, messages.TO_SECONDARY)
    assert isinstance(configure, messages.Configure), "the first message has the options"
    try:
        return await SecondaryFrontend(order, configure.options, control).run()
    except (OSError, ValueError, RuntimeError) as error:
        logger.exception("a front end leaves:")
        control.write(*messages.encode(messages.Failed(str(error))))
        await control.drain()
        return 1


def main() -> int:
    order = msgspec.json.decode(sys.argv[1], type=messages.StartOrder)
    if not die_with(order.parent_process):
        return 1
    # The primary front end decides when this one leaves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import uvloop

    return uvloop.run(serve(order))


if __name__ == "__main__":
    configure_log(format=_log_format())
    with capture_python_reports():
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
