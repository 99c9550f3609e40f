"""The routes under /v1.

Access, statistics, traces and cancellation are the same as on Triton's routes. Errors are OpenAI's.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from slipstream.server.http.exchange import JSON, ClientGone, Exchange, check_access
from slipstream.server.http.routes import (
    ANY_METHOD,
    Parameters,
    Route,
    RouteGroup,
    TracedExchange,
)
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError, Unavailable
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry, RequestTrace
from slipstream.server.openai.calls import Call
from slipstream.server.openai.chat import chat_call
from slipstream.server.openai.completions import completion_call
from slipstream.server.openai.describe import openai_paths
from slipstream.server.openai.errors import ApiError, as_api_error
from slipstream.server.openai.generation import CallAnswers, infer_request
from slipstream.server.openai.models import find_model, list_models
from slipstream.server.openai.streaming import answer_stream, answer_whole
from slipstream.server.tracing.tracing import CHAT, TEXT_COMPLETION

_MODELS = "/v1/models"
_CALLS: dict[str, Callable[[bytes, ModelRegistry], Awaitable[Call]]] = {
    "/v1/chat/completions": chat_call,
    "/v1/completions": completion_call,
}


class OpenAIRoutes:
    def __init__(self, registry: ModelRegistry, state: ServerState, context: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._context = context
        self._started = int(time.time())

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        route = Route(ANY_METHOD, "/v1/{rest}", "", self.answer)
        return RouteGroup([route], lambda: openai_paths(self._registry))

    async def answer(self, exchange: Exchange, parameters: Parameters) -> None:
        try:
            await self._route(exchange.path, exchange)
        except ClientGone:
            return
        except Exception as error:
            if exchange.started:
                raise
            problem = as_api_error(error, f"{exchange.method} {exchange.path}")
            await exchange.respond(problem.status, problem.body(), JSON, problem.headers)

    async def _route(self, path: str, exchange: Exchange) -> None:
        if path in _CALLS:
            self._check("inference", "POST", exchange)
            await self._complete(path, exchange)
        elif path == _MODELS:
            self._check("metadata", "GET", exchange)
            models = [model.document(self._started) for model in await list_models(self._registry)]
            await exchange.respond(200, msgspec.json.encode({"object": "list", "data": models}))
        elif path.startswith(_MODELS + "/"):
            self._check("metadata", "GET", exchange)
            model = await find_model(self._registry, unquote(path.removeprefix(_MODELS + "/")))
            await exchange.respond(200, msgspec.json.encode(model.document(self._started)))
        else:
            self._check("metadata", exchange.method, exchange)
            known = ", ".join((_MODELS, *_CALLS))
            message = f"There is no {path[:200]} here. Known paths: {known}"
            raise ApiError(message, status=404, code="unknown_url")

    def _check(self, api: str, method: str, exchange: Exchange) -> None:
        check_access(self._context.access, api, exchange)
        if exchange.method != method:
            raise ApiError(f"{exchange.method} is not allowed here, {method} is", status=405)

    async def _complete(self, path: str, exchange: Exchange) -> None:
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        if exchange.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise ApiError("Unsupported content-encoding, only 'identity' is supported.")
        began = time.monotonic_ns()
        body = await exchange.read_body(self._context.http_max_input_bytes)
        with exchange.cancel_on_disconnect():
            call = await _CALLS[path](body, self._registry)
            operation = CHAT if path == "/v1/chat/completions" else TEXT_COMPLETION
            trace = self._context.trace.begin(call.model.entry.name, exchange.headers, operation)
            with TracedExchange(exchange, trace, began):
                await self._answer(call, trace, exchange)

    async def _answer(self, call: Call, trace: RequestTrace | None, exchange: Exchange) -> None:
        if trace is not None:
            trace.stamp("HTTP_RECV_END")
        traces = [trace, *[trace and trace.sibling() for _ in call.texts[1:]]]
        requests = [
            infer_request(call.model, text, call.id, trace)
            for text, trace in zip(call.texts, traces, strict=True)
        ]
        answers = CallAnswers(call.model, requests, call.texts[0].sequences)
        answer = answer_stream if call.stream else answer_whole
        try:
            await answer(call, answers, exchange)
        except InferenceError as error:
            raise as_api_error(error, call.id, call.guided_by) from error
