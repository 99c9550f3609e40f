"""Triton's HTTP routes: health, metadata, configuration, generate and generate_stream, as the real server answers.

How a server is put together (no torch in this process, the engine is another one):

    repository = read_repository(path)                   # RepositoryError lists every problem at once
    engines = {name: EngineClient(model.engine.path, model.settings) for name, model in repository.engines.items()}
    generators = {name: TextGenerator(Tokenizer.load(model.tokenizer_folder), engines[name]) for name, model in …}
    registry = build_registry(repository, generators)    # registry.wrap(…) puts counters around the models
    app = create_app(registry, ServerState(engines.values()))
    await uvicorn.Server(uvicorn_config(app, address, port)).serve(sockets=[…])

The routes are plain ASGI in front of a FastAPI application, because status, framing, header set and raw paths are
part of the contract. FastAPI has what else there is: `/docs`, `/openapi.json` and whatever is mounted on it later.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from slipstream.server import logging
from slipstream.server.asgi import (
    JSON,
    MAX_BODY_BYTES,
    TEXT,
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_whole,
    too_big,
    while_connected,
)
from slipstream.server.errors import InferenceError, Unavailable
from slipstream.server.generate_http import answer_once, answer_stream
from slipstream.server.generate_request import generate_request
from slipstream.server.http_protocol import TritonProtocol
from slipstream.server.json_text import write_error, write_value
from slipstream.server.openapi import openapi_document
from slipstream.server.registry import ModelRegistry

TRITON_VERSION = "2.51.0"  # the release whose answers these are
EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging",
)  # fmt: skip
RETRY_AFTER = (b"retry-after", b"1")
_MODEL_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(generate|generate_stream|ready|config))?")
_RESERVED_NAMES = frozenset({"stats"})  # /v2/models/stats is not a model

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class State(Protocol):
    """What the server as a whole is doing; `health.ServerState` is the real one."""

    draining: bool

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...


def create_app(registry: ModelRegistry, state: State, server_name: str = "triton") -> FastAPI:
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi = lambda: openapi_document(registry)  # type: ignore[method-assign]
    page = resources.files("slipstream.server").joinpath("docs.html").read_text("utf-8")
    app.add_api_route("/docs", lambda: HTMLResponse(page), include_in_schema=False)
    app.add_exception_handler(HTTPException, _triton_error)
    app.add_middleware(TritonRoutes, registry=registry, state=state, server_name=server_name)
    return app


def uvicorn_config(app: Any, host: str = "127.0.0.1", port: int = 8000, **more: Any) -> uvicorn.Config:
    """uvicorn as Triton's clients expect a server to behave: their headers only, connections kept."""
    settings: dict[str, Any] = {
        "http": TritonProtocol, "ws": "none", "lifespan": "off", "interface": "asgi3", "server_header": False,
        "date_header": False, "proxy_headers": False, "access_log": False, "log_config": None,
        "timeout_keep_alive": 120,
    }  # fmt: skip
    return uvicorn.Config(app, host=host, port=port, **{**settings, **more})


async def _triton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = Response(write_error(str(error.detail)), error.status_code)
    response.headers["content-type"] = "text/plain"  # without the charset that Response would add
    return response


class TritonRoutes:
    """ASGI: everything under /v2; the rest goes on to the application behind."""

    def __init__(self, app: Handler, registry: ModelRegistry, state: State, server_name: str) -> None:
        self._app = app
        self._registry = registry
        self._state = state
        self._server = {"name": server_name, "version": TRITON_VERSION, "extensions": list(EXTENSIONS)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path", b"").decode("latin-1")
        if scope["type"] != "http" or not (path == "/v2" or path.startswith("/v2/")):
            await self._app(scope, receive, send)
            return
        started = _Started(send)
        try:
            await self._route(path, scope, receive, started)
        except InferenceError as error:
            headers = (RETRY_AFTER,) if isinstance(error, Unavailable) else ()
            await send_whole(send, error.status, write_error(error.message), JSON, headers)
        except ClientGone:
            return
        except Exception:
            if started.yes:
                raise  # uvicorn logs it and closes, so that the client does not take a part for the whole
            logging.error(f"{scope['method']} {path}: {traceback.format_exc().rstrip()}")
            await send_whole(send, 500, write_error("internal error, the server's log has the details"))

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/v2":
            await self._get(scope, send, JSON, lambda: (200, write_value(self._server)))
        elif path in ("/v2/health/live", "/v2/health/ready"):
            healthy = self._state.live if path.endswith("live") else self._state.ready
            await self._get(scope, send, TEXT, lambda: (200 if healthy else 400, b""))
        else:
            match = _MODEL_PATH.fullmatch(path)
            if match is None or match.group(1) in _RESERVED_NAMES:
                await send_whole(send, 404, write_error("Not Found"), TEXT)
            else:
                name, version, kind = match.groups(default="")
                await self._model(name, version, kind, scope, receive, send)

    async def _model(self, name: str, version: str, kind: str, scope: Scope, receive: Receive, send: Send) -> None:
        if kind in ("generate", "generate_stream"):
            await self._generate(name, version, kind == "generate_stream", scope, receive, send)
        elif kind == "ready":
            ready = (200, b"") if self._registry.is_ready(name, version) else (400, _NOT_READY)
            await self._get(scope, send, TEXT, lambda: ready)
        elif kind == "config":
            await self._get(scope, send, JSON, lambda: (200, write_value(self._registry.configuration(name, version))))
        else:
            await self._get(scope, send, JSON, lambda: (200, write_value(self._registry.metadata(name, version))))

    async def _get(
        self, scope: Scope, send: Send, content_type: bytes, answer: Callable[[], tuple[int, bytes]]
    ) -> None:
        status, body = answer() if scope["method"] == "GET" else (405, _NOT_ALLOWED)
        await send_whole(send, status, body, content_type)

    async def _generate(
        self, name: str, version: str, stream: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["method"] != "POST":
            await send_whole(send, 405, _NOT_ALLOWED)
            return
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        entry = self._registry.find(name, version)
        if header(scope, b"content-encoding").lower() not in (b"", b"identity"):
            raise InferenceError("Unsupported content-encoding, only 'identity' is supported.")
        request = generate_request(await _body(scope, receive), entry.model.config, entry.version)
        answer = answer_stream if stream else answer_once
        await while_connected(receive, answer(entry.model, request, send))


async def _body(scope: Scope, receive: Receive) -> bytes:
    if header(scope, b"expect") and int(header(scope, b"content-length") or 0) > MAX_BODY_BYTES:
        raise too_big(int(header(scope, b"content-length")))  # it waits to be told to send; it need not
    return await read_body(scope, receive)


_NOT_ALLOWED = write_error("Method Not Allowed")
_NOT_READY = write_error("Model version not ready")


class _Started:
    """A `send` that remembers whether the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.yes = False

    async def __call__(self, message: Any) -> None:
        self.yes = True
        await self._send(message)
