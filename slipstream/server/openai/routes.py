"""The routes under /v1, and those beside them that other servers of OpenAI's API have.

Access, statistics, traces and cancellation are the same as on Triton's routes. Errors are OpenAI's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

import msgspec

from slipstream.server.http.exchange import JSON, TEXT, Exchange, check_access
from slipstream.server.http.routes import (
    ANY_METHOD,
    Parameters,
    Route,
    RouteGroup,
    RouteHandler,
    compile_path,
)
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.adapters import API as LOAD_ADAPTERS
from slipstream.server.openai.adapters import AdapterLoader
from slipstream.server.openai.chat import chat_call
from slipstream.server.openai.completions import completion_call
from slipstream.server.openai.describe import openai_paths
from slipstream.server.openai.errors import ApiError, run_route
from slipstream.server.openai.models import find_model, list_models
from slipstream.server.openai.pooling.embeddings import embedding_call
from slipstream.server.openai.pooling.rerank import rerank_call, score_call
from slipstream.server.openai.pooling.service import PoolingService, ReadPoolingCall
from slipstream.server.openai.responses.service import ResponseService
from slipstream.server.openai.streaming import CallService, ReadCall, read_request_body
from slipstream.server.openai.tokenize import detokenize, tokenize
from slipstream.server.tracing.tracing import CHAT, TEXT_COMPLETION

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
Computation = Callable[[bytes, ModelRegistry], Awaitable[bytes]]


@dataclass(frozen=True)
class Endpoint:
    """One line of the table. `api`: the access-control group."""

    method: str
    path: str
    api: str
    handler: RouteHandler


class OpenAIRoutes:
    def __init__(self, registry: ModelRegistry, state: ServerState, context: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._context = context
        self._adapters = AdapterLoader(registry, context.access)
        self._calls = CallService(registry, state, context)
        self._pooling_service = PoolingService(registry, state, context)
        self._responses = ResponseService(self._calls)
        self._started = int(time.time())
        self._endpoints = self._table()
        self._patterns = [(compile_path(endpoint.path), endpoint) for endpoint in self._endpoints]

    def _table(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/v1/models", "metadata", self._list_models),
            Endpoint("GET", "/v1/models/{rest}", "metadata", self._describe_model),
            self._generation("/v1/chat/completions", chat_call, CHAT),
            self._generation("/v1/completions", completion_call, TEXT_COMPLETION),
            self._computation("/tokenize", tokenize),
            self._computation("/detokenize", detokenize),
            Endpoint("POST", "/v1/load_lora_adapter", LOAD_ADAPTERS, self._load_adapter),
            Endpoint("POST", "/v1/unload_lora_adapter", LOAD_ADAPTERS, self._unload_adapter),
            self._pooling("/v1/embeddings", embedding_call),
            *[self._pooling(path, rerank_call) for path in RERANK_PATHS],
            *[self._pooling(path, score_call) for path in SCORE_PATHS],
            *self._response_endpoints(),
        ]

    def _response_endpoints(self) -> list[Endpoint]:
        responses = self._responses
        one = "/v1/responses/{id}"
        return [
            Endpoint("POST", "/v1/responses", "inference", responses.create),
            self._computation("/v1/responses/input_tokens", responses.count_input_tokens),
            Endpoint("GET", one, "inference", responses.retrieve),
            Endpoint("DELETE", one, "inference", responses.delete),
            Endpoint("POST", f"{one}/cancel", "inference", responses.cancel),
            Endpoint("GET", f"{one}/input_items", "inference", responses.list_input_items),
        ]

    def _generation(self, path: str, read_call: ReadCall, operation: str) -> Endpoint:
        async def answer(exchange: Exchange, parameters: Parameters) -> None:
            await self._calls.answer(exchange, read_call, operation)

        return Endpoint("POST", path, "inference", answer)

    def _pooling(self, path: str, read_call: ReadPoolingCall) -> Endpoint:
        async def answer(exchange: Exchange, parameters: Parameters) -> None:
            await self._pooling_service.answer(exchange, read_call)

        return Endpoint("POST", path, "inference", answer)

    def _computation(self, path: str, work: Computation) -> Endpoint:
        """Return an endpoint that computes one JSON document from another."""

        async def answer(exchange: Exchange, parameters: Parameters) -> None:
            body = await read_request_body(exchange, self._state, self._context)
            with exchange.cancel_on_disconnect():
                document = await work(body, self._registry)
            await exchange.respond(200, document)

        return Endpoint("POST", path, "inference", answer)

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        paths = [endpoint.path for endpoint in self._endpoints]
        others = dict.fromkeys(path for path in paths if not path.startswith("/v1/"))
        routes = [Route(ANY_METHOD, path, "", self.answer) for path in ("/v1/{rest}", *others)]
        return RouteGroup(routes, partial(openai_paths, self._registry))

    async def answer(self, exchange: Exchange, parameters: Parameters) -> None:
        problem = await run_route(self._route, exchange)
        if problem is not None:
            await exchange.respond(problem.status, problem.body(), JSON, problem.headers)

    async def _route(self, exchange: Exchange) -> None:
        found = self._find(exchange.path)
        if not found:
            check_access(self._context.access, "metadata", exchange)
            paths = {endpoint.path for endpoint in self._endpoints if "{" not in endpoint.path}
            known = ", ".join(sorted(paths))
            message = f"There is no {exchange.path[:200]} here. Known paths: {known}"
            raise ApiError(message, status=404, code="unknown_url")
        for match, endpoint in found:
            if endpoint.method == exchange.method:
                check_access(self._context.access, endpoint.api, exchange)
                await endpoint.handler(exchange, match.groupdict())
                return
        check_access(self._context.access, found[0][1].api, exchange)
        allowed = ", ".join([endpoint.method for _, endpoint in found])
        raise ApiError(f"{exchange.method} is not allowed here, {allowed} is", status=405)

    def _find(self, path: str) -> list[tuple[re.Match[str], Endpoint]]:
        """Return the endpoints of a path, one for each method."""
        matches = [(pattern.fullmatch(path), endpoint) for pattern, endpoint in self._patterns]
        return [(match, endpoint) for match, endpoint in matches if match is not None]

    async def _load_adapter(self, exchange: Exchange, parameters: Parameters) -> None:
        body = await read_request_body(exchange, self._state, self._context)
        await exchange.respond(200, await self._adapters.load(body), TEXT)

    async def _unload_adapter(self, exchange: Exchange, parameters: Parameters) -> None:
        body = await read_request_body(exchange, self._state, self._context)
        await exchange.respond(200, await self._adapters.unload(body), TEXT)

    async def _list_models(self, exchange: Exchange, parameters: Parameters) -> None:
        models = [model.document(self._started) for model in await list_models(self._registry)]
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": models}))

    async def _describe_model(self, exchange: Exchange, parameters: Parameters) -> None:
        model = await find_model(self._registry, unquote(parameters["rest"]))
        await exchange.respond(200, msgspec.json.encode(model.document(self._started)))
