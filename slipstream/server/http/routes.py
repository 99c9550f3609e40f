"""The table of HTTP routes, and Triton's endpoints for models, inference, health and statistics.

`services.create_app` builds the routes of a server, with those of OpenAI's API.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from slipstream.server.http import admin
from slipstream.server.http.exchange import (
    JSON,
    RETRY_AFTER,
    TEXT,
    ClientGone,
    Exchange,
    Refused,
    check_access,
    check_page_for_work,
    check_site,
)
from slipstream.server.http.generate import answer_once, answer_stream, read_request
from slipstream.server.http.infer import (
    answer_infer,
    check_coupled,
    forwarded_headers,
    read_call,
)
from slipstream.server.http.pages import PAGES, openapi_document, read_page
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import (
    InferenceError,
    NeedsPrimary,
    PlainTextError,
    Unavailable,
)
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry, ModelVersion, RequestTrace
from slipstream.server.kserve.server_metadata import EXTENSIONS, TRITON_VERSION
from slipstream.server.kserve.triton_json import write_error, write_value
from slipstream.server.metrics.statistics_api import model_statistics
from slipstream.server.tracing.tracing import Finishing

logger = logging.getLogger(__name__)

Parameters = Mapping[str, str]  # of a path
RouteHandler = Callable[[Exchange, Parameters], Awaitable[None]]

GET = ("GET",)
POST = ("POST",)
GET_POST = ("GET", "POST")
ANY_METHOD: tuple[str, ...] = ()

_NOT_ALLOWED = "Method Not Allowed"
_NOT_READY = write_error("Model version not ready")
_PARAMETER_PATTERNS = {"version": "[0-9]+", "kind": "system|cuda", "rest": ".*"}


@dataclass(frozen=True)
class Route:
    """One line of the table.

    In `path`, `{name}` is a parameter and a part in brackets is optional.
    `api`: the access-control group; empty if the handler checks access itself.
    """

    methods: tuple[str, ...]
    path: str
    api: str
    handler: RouteHandler
    not_allowed_type: bytes = JSON  # content type of the response to another method


@dataclass(frozen=True)
class RouteGroup:
    """Routes that another package adds, and their part of the OpenAPI document."""

    routes: Sequence[Route]
    describe: Callable[[], dict[str, Any]]


class TracedExchange:
    """`with TracedExchange(exchange, trace):` records the work within and its response.

    `trace` is None for a request that is not traced. `arrival_ns` 0 means the current time.
    """

    __slots__ = ("_arrival_ns", "_exchange", "_finishing", "_trace")

    def __init__(self, exchange: Exchange, trace: RequestTrace | None, arrival_ns: int = 0) -> None:
        self._exchange = exchange
        self._trace = trace
        self._arrival_ns = arrival_ns
        self._finishing = None if trace is None else Finishing(trace)

    def __enter__(self) -> None:
        if self._trace is not None:
            self._trace.stamp("HTTP_RECV_START", self._arrival_ns)
            self._exchange.trace = self._trace

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._finishing is not None:
            self._exchange.trace = None
            self._finishing.__exit__(kind, error, traceback)


def compile_path(path: str) -> re.Pattern[str]:
    """Return the regular expression of a route's path."""
    pattern = path.replace("[", "(?:").replace("]", ")?")
    return re.compile(re.sub(r"\{(\w+)\}", _parameter_pattern, pattern))


def _parameter_pattern(match: re.Match[str]) -> str:
    name = match[1]
    return f"(?P<{name}>{_PARAMETER_PATTERNS.get(name, '[^/]+')})"


class HttpRoutes:
    """The handler of the HTTP port."""

    def __init__(
        self,
        registry: ModelRegistry,
        state: ServerState,
        context: ServerContext,
        groups: Sequence[RouteGroup] = (),
    ) -> None:
        self._registry = registry
        self._state = state
        self._context = context
        self._groups = groups
        routes = [*self._model_routes(), *self._admin_routes(), *self._page_routes()]
        for group in groups:
            routes += group.routes
        self._table = [(compile_path(route.path), route) for route in routes]
        self._find_route = lru_cache(maxsize=256)(self._search_table)

    def _model_routes(self) -> list[Route]:
        model = "/v2/models/{model}[/versions/{version}]"
        return [
            Route(GET, "/v2", "metadata", self._describe_server),
            Route(GET, "/v2/health/live", "health", self._live, TEXT),
            Route(GET, "/v2/health/ready", "health", self._ready, TEXT),
            Route(GET, "/v2/models/stats", "statistics", self._statistics),
            Route(POST, f"{model}/infer", "inference", self._infer, TEXT),
            Route(POST, f"{model}/generate", "inference", self._generate),
            Route(POST, f"{model}/generate_stream", "inference", self._generate_stream),
            Route(GET, f"{model}/ready", "health", self._model_ready, TEXT),
            Route(GET, f"{model}/config", "model-config", self._model_config),
            Route(GET, f"{model}/stats", "statistics", self._statistics),
            Route(GET, model, "metadata", self._describe_model),
        ]

    def _admin_routes(self) -> list[Route]:
        repository = "/v2/repository[/{repository}]"
        memory = "/v2/{kind}sharedmemory[/region/{region}]"
        table = [
            (POST, f"{repository}/index", "model-repository", admin.list_models),
            (POST, f"{repository}/models/{{model}}/load", "model-repository", admin.load_model),
            (POST, f"{repository}/models/{{model}}/unload", "model-repository", admin.unload_model),
            (GET_POST, "/v2/logging", "logging", admin.configure_logging),
            (GET_POST, "/v2/trace/setting", "trace", admin.configure_tracing),
            (GET_POST, "/v2/models/{model}/trace/setting", "trace", admin.configure_tracing),
            (GET, f"{memory}/status", "shared-memory", admin.describe_shared_memory),
            (POST, f"{memory}/register", "shared-memory", admin.register_shared_memory),
            (POST, f"{memory}/unregister", "shared-memory", admin.unregister_shared_memory),
        ]
        return [
            Route(methods, path, api, partial(self._administer, work))
            for methods, path, api, work in table
        ]

    def _page_routes(self) -> list[Route]:
        routes = [Route(("GET", "HEAD"), "/openapi.json", "metadata", self._openapi, TEXT)]
        for path, file in PAGES.items():
            routes.append(Route(GET, path, "", read_page(file), TEXT))  # a page holds no secrets
        return routes

    def _search_table(self, path: str) -> tuple[Route, Parameters] | None:
        for pattern, route in self._table:
            match = pattern.fullmatch(path)
            if match is not None:
                return route, match.groupdict(default="")
        return None

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await self._dispatch(exchange)
        except Refused as refusal:
            body = write_error(refusal.message)
            await exchange.respond(refusal.status, body, refusal.content_type)
        except InferenceError as error:
            headers = (RETRY_AFTER,) if isinstance(error, Unavailable) else ()
            content_type = TEXT if isinstance(error, PlainTextError) else JSON
            await exchange.respond(error.status, write_error(error.message), content_type, headers)
        except ClientGone:
            return
        except NeedsPrimary:
            raise
        except Exception:
            if exchange.started:
                # close the connection, so that the client sees that the response is truncated
                raise
            logger.exception("%s %s failed:", exchange.method, exchange.path)
            body = write_error("internal error, the server's log has the details")
            await exchange.respond(500, body)

    async def _dispatch(self, exchange: Exchange) -> None:
        if check_site(self._context.origin_policy, exchange):
            await exchange.respond(200, b"")
            return
        found = self._find_route(exchange.path)
        if found is None:
            if not exchange.path.startswith("/v2/"):
                check_access(self._context.access, "metadata", exchange)
            raise Refused(404, "Not Found")
        route, parameters = found
        if route.api:
            check_access(self._context.access, route.api, exchange)
        if route.methods and exchange.method not in route.methods:
            raise Refused(405, _NOT_ALLOWED, route.not_allowed_type)
        if route.api == "inference":
            check_page_for_work(self._context.origin_policy, exchange)
        await route.handler(exchange, parameters)

    # -- the server and its models

    async def _describe_server(self, exchange: Exchange, parameters: Parameters) -> None:
        server = {
            "name": self._context.server_name,
            "version": TRITON_VERSION,
            "extensions": list(EXTENSIONS),
        }
        await exchange.respond(200, write_value(server))

    async def _live(self, exchange: Exchange, parameters: Parameters) -> None:
        await exchange.respond(200 if self._state.live else 400, b"", TEXT)

    async def _ready(self, exchange: Exchange, parameters: Parameters) -> None:
        await exchange.respond(200 if self._state.ready else 400, b"", TEXT)

    async def _describe_model(self, exchange: Exchange, parameters: Parameters) -> None:
        metadata = self._registry.metadata(parameters["model"], parameters["version"])
        await exchange.respond(200, write_value(metadata))

    async def _model_config(self, exchange: Exchange, parameters: Parameters) -> None:
        config = self._registry.configuration(parameters["model"], parameters["version"])
        await exchange.respond(200, write_value(config))

    async def _model_ready(self, exchange: Exchange, parameters: Parameters) -> None:
        if self._registry.is_ready(parameters["model"], parameters["version"]):
            await exchange.respond(200, b"", TEXT)
        else:
            await exchange.respond(400, _NOT_READY, TEXT)

    async def _statistics(self, exchange: Exchange, parameters: Parameters) -> None:
        """Statistics of the model in the path, or of all models."""
        model = parameters.get("model", "")
        await self._context.collect_statistics()
        found = model_statistics(self._registry, model, parameters.get("version", ""))
        await exchange.respond(200, write_value({"model_stats": found}))

    async def _openapi(self, exchange: Exchange, parameters: Parameters) -> None:
        paths: dict[str, Any] = {}
        for group in self._groups:
            paths |= group.describe()
        await exchange.respond(200, openapi_document(self._registry, paths))

    async def _administer(
        self,
        work: Callable[[admin.AdminCall], Awaitable[bytes]],
        exchange: Exchange,
        parameters: Parameters,
    ) -> None:
        body = await exchange.read_body(self._context.http_max_input_bytes)
        call = admin.AdminCall(exchange.method, parameters, body, self._context, self._registry)
        response = await work(call)
        await self._context.settle()
        await exchange.respond(200, response)

    # -- inference

    async def _infer(self, exchange: Exchange, parameters: Parameters) -> None:
        try:
            entry = self._find_model(parameters)
        except Unavailable:
            raise
        except InferenceError as error:
            raise PlainTextError(error.message, error.code) from error
        check_coupled(entry)
        limit = self._context.http_max_input_bytes
        memory = self._context.memory
        trace = self._begin_trace(entry.name, exchange)
        with TracedExchange(exchange, trace):
            body = await exchange.read_body(limit)
            if trace is not None:
                trace.stamp("HTTP_RECV_END")
            with exchange.cancel_on_disconnect():
                call = await read_call(exchange, body, entry, memory, limit)
                call.request.times.trace = trace
                memory.check_places(output.place for output in call.outputs)
                if (forwarded := self._context.http_forwarded_headers) is not None:
                    call.request.parameters.update(forwarded_headers(exchange, forwarded))
                await answer_infer(entry, call, memory, exchange)

    async def _generate(self, exchange: Exchange, parameters: Parameters) -> None:
        await self._answer_generate(exchange, parameters, answer_once)

    async def _generate_stream(self, exchange: Exchange, parameters: Parameters) -> None:
        await self._answer_generate(exchange, parameters, answer_stream)

    async def _answer_generate(
        self, exchange: Exchange, parameters: Parameters, answer: Callable[..., Awaitable[None]]
    ) -> None:
        entry = self._find_model(parameters)
        if exchange.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise InferenceError("Unsupported content-encoding, only 'identity' is supported.")
        trace = self._begin_trace(entry.name, exchange)
        with TracedExchange(exchange, trace):
            body = await exchange.read_body(self._context.http_max_input_bytes)
            if trace is not None:
                trace.stamp("HTTP_RECV_END")
            with exchange.cancel_on_disconnect():
                request = await read_request(body, entry.model.config, entry.version)
                request.times.trace = trace
                await answer(entry.model, request, exchange)

    def _begin_trace(self, model: str, exchange: Exchange) -> RequestTrace | None:
        traces = self._context.trace
        return traces.begin(model, exchange.headers) if traces.active else None

    def _find_model(self, parameters: Parameters) -> ModelVersion:
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        return self._registry.find(parameters["model"], parameters["version"])
