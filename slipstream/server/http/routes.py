"""Triton's HTTP routes as the real server answers them: models, infer and generate, statistics,
control, settings.

How a server is put together (no torch in this process, the engine is another one): `services.py`
does it with

    registry = ModelRegistry()                           # registry.wrap(…) puts counters around the models
    loader = ModelLoader(paths, registry, engines, …)    # models come and go; also the control that clients have
    app = create_app(registry, ServerState(engines), ServerContext(control=loader, …))
    await uvicorn.Server(uvicorn_config(app, address, port)).serve(sockets=[…])

and tests with `build_registry(read_repository(path), generators)`, whose models stay.

The routes are plain ASGI in front of a FastAPI application, because status, framing, header set and
raw paths are part of the contract. FastAPI has what else there is: the pages `/` and `/docs`,
`/openapi.json` and whatever is mounted on it later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.http import deep_health
from slipstream.server.http.admin import (
    MODEL_TRACE,
    REPOSITORY,
    SHARED_MEMORY,
    logging_route,
    repository_route,
    shared_memory_route,
    trace_route,
)
from slipstream.server.http.asgi import (
    JSON,
    RETRY_AFTER,
    TEXT,
    ClientGone,
    Receive,
    Refused,
    Scope,
    Send,
    WhileConnected,
    check_access,
    header,
    read_body,
    send_whole,
)
from slipstream.server.http.connection import TritonProtocol
from slipstream.server.http.generate import answer_once, answer_stream
from slipstream.server.http.generate_request import generate_request
from slipstream.server.http.infer import (
    EarlyError,
    answer_infer,
    check_coupled,
    forwarded_headers,
    read_call,
)
from slipstream.server.http.openapi import openapi_document
from slipstream.server.http.pages import PAGES, page
from slipstream.server.http.trace import StampedSend
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError, Unavailable
from slipstream.server.kserve.json_writer import write_error, write_value
from slipstream.server.kserve.registry import ModelRegistry, ModelVersion
from slipstream.server.metrics.statistics import model_statistics
from slipstream.server.openai.routes import OpenAIRoutes
from slipstream.server.tracing.tracing import Finishing

logger = logging.getLogger(__name__)

TRITON_VERSION = "2.51.0"  # the release whose answers these are
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
_MODEL_PATH = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|generate|generate_stream|ready|config|stats))?"
)
_APIS = {"ready": "health", "config": "model-config", "stats": "statistics", "": "metadata"}
_OWN_PATHS = frozenset(
    {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/stats",
    }
)

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


@lru_cache(maxsize=256)
def _model_path(path: str) -> tuple[str, str, str] | None:
    """The model, its version and what is asked of it; clients ask the same few again and again."""
    match = _MODEL_PATH.fullmatch(path)
    return (match[1], match[2] or "", match[3] or "") if match else None


class State(Protocol):
    """What the server as a whole is doing; `health.ServerState` is the real one."""

    draining: bool

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...


def create_app(
    registry: ModelRegistry, state: State, context: ServerContext | None = None
) -> TritonRoutes:
    """`context` is what the protocols of a server share; without one, models are fixed and
    everything is open.
    """
    context = context or ServerContext()
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = lambda: openapi_document(registry)  # type: ignore[method-assign]
    for path, file in PAGES.items():
        app.add_api_route(path, page(file), include_in_schema=False)
    app.add_exception_handler(HTTPException, _triton_error)
    return TritonRoutes(app, registry, state, context)


def uvicorn_config(
    app: Any, host: str = "127.0.0.1", port: int = 8000, **more: Any
) -> uvicorn.Config:
    """uvicorn as Triton's clients expect a server to behave: their headers only, connections kept."""
    settings: dict[str, Any] = {
        "http": TritonProtocol,
        "ws": "none",
        "lifespan": "off",
        "interface": "asgi3",
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "access_log": False,
        "log_config": None,
        "timeout_keep_alive": 120,
    }
    return uvicorn.Config(app, host=host, port=port, **{**settings, **more})


async def _triton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = Response(write_error(str(error.detail)), error.status_code)
    response.headers["content-type"] = "text/plain"  # without the charset that Response would add
    return response


class TritonRoutes:
    """ASGI: everything under /v2, and OpenAI's under /v1; the rest goes on to the application
    behind.
    """

    def __init__(
        self, app: Handler, registry: ModelRegistry, state: State, context: ServerContext
    ) -> None:
        self._app = app
        self._registry = registry
        self._state = state
        self._context = context
        self._openai = OpenAIRoutes(registry, state, context)
        self._server = {
            "name": context.server_name,
            "version": TRITON_VERSION,
            "extensions": list(EXTENSIONS),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path", b"").decode("latin-1")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if path == "/v2" or path.startswith("/v2/"):
                await self._route(path, scope, receive, send)
            elif path.startswith("/v1/"):
                await self._openai(path, scope, receive, send)
            elif path in deep_health.PATHS:
                await self._deep_health(path, scope, send)
            else:
                self._check_access("metadata", scope)
                await self._app(scope, receive, send)
        except Refused as refusal:
            await send_whole(
                send, refusal.status, write_error(refusal.message), refusal.content_type
            )
        except InferenceError as error:
            headers = (RETRY_AFTER,) if isinstance(error, Unavailable) else ()
            content_type = TEXT if isinstance(error, EarlyError) else JSON
            await send_whole(send, error.status, write_error(error.message), content_type, headers)
        except ClientGone:
            return
        except Exception:
            logger.exception("%s %s failed:", scope["method"], path)
            # Where the answer has begun, uvicorn refuses this one and closes: a part must not be
            # taken for the whole.
            await send_whole(
                send, 500, write_error("internal error, the server's log has the details")
            )

    def _check_access(self, api: str, scope: Scope) -> None:
        check_access(self._context.access, api, scope)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path in _OWN_PATHS:
            await self._server_route(path, scope, receive, send)
        elif parts := _model_path(path):
            name, version, kind = parts
            self._check_access(_APIS.get(kind, "inference"), scope)
            if kind == "infer":
                await self._infer(name, version, scope, receive, send)
            elif kind in ("generate", "generate_stream"):
                await self._generate(name, version, kind == "generate_stream", scope, receive, send)
            else:
                await self._describe_model(name, version, kind, scope, send)
        elif match := REPOSITORY.fullmatch(path):
            self._check_access("model-repository", scope)
            work = partial(repository_route, match, self._context)
            await self._administer(("POST",), work, scope, receive, send)
        elif match := MODEL_TRACE.fullmatch(path):
            await self._trace(match.group(1), scope, receive, send)
        elif match := SHARED_MEMORY.fullmatch(path):
            await self._shared_memory(match, scope, receive, send)
        else:
            await send_whole(send, 404, write_error("Not Found"), TEXT)

    async def _server_route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/v2/trace/setting":
            await self._trace("", scope, receive, send)
        elif path == "/v2/logging":
            self._check_access("logging", scope)
            work = partial(logging_route, scope["method"])
            await self._administer(("GET", "POST"), work, scope, receive, send)
        elif path == "/v2/models/stats":
            self._check_access("statistics", scope)
            await self._get(scope, send, JSON, lambda: (200, self._statistics("", "")))
        elif path == "/v2":
            self._check_access("metadata", scope)
            await self._get(scope, send, JSON, lambda: (200, write_value(self._server)))
        else:
            self._check_access("health", scope)
            healthy = self._state.live if path.endswith("live") else self._state.ready
            await self._get(scope, send, TEXT, lambda: (200 if healthy else 400, b""))

    async def _deep_health(self, path: str, scope: Scope, send: Send) -> None:
        self._check_access("health", scope)
        why_not = "" if self._state.ready else "the server is not ready"
        if not why_not and scope["method"] == "GET" and path == deep_health.GENERATE:
            with WhileConnected(scope):
                why_not = await deep_health.why_not_generating(self._registry)
        await self._get(
            scope, send, JSON, lambda: (503, write_error(why_not)) if why_not else (200, b"{}")
        )

    async def _describe_model(
        self, name: str, version: str, kind: str, scope: Scope, send: Send
    ) -> None:
        if kind == "ready":
            ready = (200, b"") if self._registry.is_ready(name, version) else (400, _NOT_READY)
            await self._get(scope, send, TEXT, lambda: ready)
        elif kind == "config":
            await self._get(
                scope,
                send,
                JSON,
                lambda: (200, write_value(self._registry.configuration(name, version))),
            )
        elif kind == "stats":
            await self._get(scope, send, JSON, lambda: (200, self._statistics(name, version)))
        else:
            await self._get(
                scope,
                send,
                JSON,
                lambda: (200, write_value(self._registry.metadata(name, version))),
            )

    def _statistics(self, name: str, version: str) -> bytes:
        return write_value({"model_stats": model_statistics(self._registry, name, version)})

    async def _get(
        self, scope: Scope, send: Send, content_type: bytes, answer: Callable[[], tuple[int, bytes]]
    ) -> None:
        if scope["method"] != "GET":
            raise Refused(405, _NOT_ALLOWED, content_type)
        status, body = answer()
        await send_whole(send, status, body, content_type)

    async def _administer(
        self,
        methods: tuple[str, ...],
        work: Callable[[bytes], Awaitable[bytes]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if scope["method"] not in methods:
            raise Refused(405, _NOT_ALLOWED, JSON)
        body = await read_body(scope, receive, self._context.http_max_input_bytes)
        await send_whole(send, 200, await work(body))

    async def _trace(self, model: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_access("trace", scope)
        work = partial(trace_route, scope["method"], model, self._context, self._registry)
        await self._administer(("GET", "POST"), work, scope, receive, send)

    async def _shared_memory(
        self, match: re.Match[str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._check_access("shared-memory", scope)
        methods = ("GET",) if match.group(3) == "status" else ("POST",)
        work = partial(shared_memory_route, match, self._context)
        await self._administer(methods, work, scope, receive, send)

    def _asked_model(
        self, name: str, version: str, scope: Scope, not_allowed_type: bytes = JSON
    ) -> ModelVersion:
        if scope["method"] != "POST":
            raise Refused(405, _NOT_ALLOWED, not_allowed_type)
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        return self._registry.find(name, version)

    async def _infer(
        self, name: str, version: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            entry = self._asked_model(name, version, scope, TEXT)
        except InferenceError as error:
            if isinstance(error, Unavailable):
                raise
            raise EarlyError(error.message, error.code) from error
        check_coupled(entry)
        most, memory = self._context.http_max_input_bytes, self._context.memory
        if (trace := self._context.trace.begin(entry.name, scope["headers"])) is not None:
            send = StampedSend(send, trace)
        with Finishing(trace):
            body = await read_body(scope, receive, most)
            if trace is not None:
                trace.stamp("HTTP_RECV_END")
            call = read_call(scope, body, entry, memory, most)
            call.request.trail.trace = trace
            if (forwarded := self._context.http_forwarded_headers) is not None:
                call.request.parameters.update(forwarded_headers(scope, forwarded))
            with WhileConnected(scope):
                await answer_infer(entry, call, memory, scope, send)

    async def _generate(
        self, name: str, version: str, stream: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        entry = self._asked_model(name, version, scope)
        if header(scope, b"content-encoding").lower() not in (b"", b"identity"):
            raise InferenceError("Unsupported content-encoding, only 'identity' is supported.")
        if (trace := self._context.trace.begin(entry.name, scope["headers"])) is not None:
            send = StampedSend(send, trace)
        with Finishing(trace):
            body = await read_body(scope, receive, self._context.http_max_input_bytes)
            if trace is not None:
                trace.stamp("HTTP_RECV_END")
            request = generate_request(body, entry.model.config, entry.version)
            request.trail.trace = trace
            with WhileConnected(scope):
                await (answer_stream if stream else answer_once)(entry.model, request, send)


_NOT_ALLOWED = "Method Not Allowed"
_NOT_READY = write_error("Model version not ready")
