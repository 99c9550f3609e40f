"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens.

They must come before OpenAI's in the table of routes, which take every path under /v1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from slipstream.server.anthropic.errors import error_body, new_request_id
from slipstream.server.anthropic.fields import (
    FIELD_NAMES,
    MessagesFields,
    read_count_fields,
    read_messages_fields,
)
from slipstream.server.anthropic.writer import MessageWriter
from slipstream.server.http.exchange import JSON, Exchange, check_access
from slipstream.server.http.routes import ANY_METHOD, Parameters, Route, RouteGroup
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.calls import Call
from slipstream.server.openai.chat import PreparedChat, prepare_chat
from slipstream.server.openai.describe import body_schema
from slipstream.server.openai.errors import ApiError, rename_field, rename_in_error, run_route
from slipstream.server.openai.fields import ChatFields
from slipstream.server.openai.models import find_model, text_models
from slipstream.server.openai.streaming import CallService, read_request_body
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.tracing.tracing import CHAT

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"


class AnthropicRoutes:
    def __init__(self, registry: ModelRegistry, state: ServerState, context: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._context = context
        self._calls = CallService(registry, state, context)

    def group(self) -> RouteGroup:
        """Return these routes for the table of the HTTP port."""
        route = Route(ANY_METHOD, f"{MESSAGES}[/{{rest}}]", "", self.answer)
        return RouteGroup([route], partial(anthropic_paths, self._registry))

    async def answer(self, exchange: Exchange, parameters: Parameters) -> None:
        problem = await run_route(self._route, exchange)
        if problem is not None:
            identity = new_request_id()
            headers = (*problem.headers, (b"request-id", identity.encode()))
            await exchange.respond(problem.status, error_body(problem, identity), JSON, headers)

    async def _route(self, exchange: Exchange) -> None:
        check_access(self._context.access, "inference", exchange)
        handler = {MESSAGES: self._create, COUNT_TOKENS: self._count}.get(exchange.path)
        if handler is None:
            known = f"Known paths: {MESSAGES}, {COUNT_TOKENS}"
            raise ApiError(f"There is no {exchange.path[:200]} here. {known}", status=404)
        if exchange.method != "POST":
            raise ApiError(f"{exchange.method} is not allowed here, POST is", status=405)
        await handler(exchange)

    async def _create(self, exchange: Exchange) -> None:
        await self._calls.answer(exchange, messages_call, CHAT)

    async def _count(self, exchange: Exchange) -> None:
        body = await read_request_body(exchange, self._state, self._context)
        with exchange.cancel_on_disconnect():
            fields = await in_thread_if_long(len(body), read_count_fields, body)
            prepared = await _prepare(fields, len(body), self._registry)
        count = {"input_tokens": len(prepared.text.prompt)}
        await exchange.respond(200, msgspec.json.encode(count))


async def messages_call(body: bytes, registry: ModelRegistry) -> Call:
    fields, chat, unknown = await in_thread_if_long(len(body), read_messages_fields, body)
    prepared = await _prepare(chat, len(body), registry)
    omit_thinking = fields.thinking is not None and fields.thinking.display == "omitted"
    writer = MessageWriter(prepared, fields.stop_sequences, omit_thinking)
    return Call(
        prepared.model,
        [prepared.text],
        writer.id,
        writer,
        fields.stream,
        unknown,
        rename_field(prepared.guided_by, FIELD_NAMES),
        count_reasoning=prepared.count_reasoning,
    )


async def _prepare(fields: ChatFields, size: int, registry: ModelRegistry) -> PreparedChat:
    model = await find_model(registry, fields.model)
    try:
        return await prepare_chat(fields, size, model)
    except ApiError as error:
        raise rename_in_error(error, FIELD_NAMES) from error


def anthropic_paths(registry: ModelRegistry) -> dict[str, Any]:
    """Return the routes for the OpenAPI document, with examples that run."""
    model = next((model.id for model in text_models(registry)), "ensemble")
    question = [{"role": "user", "content": "Name three colours."}]
    messages = {"model": model, "max_tokens": 32, "messages": question}
    count = {"model": model, "messages": question}
    return {
        MESSAGES: _describe("Create a message, whole or as a stream", messages),
        COUNT_TOKENS: _describe("Count the tokens of messages", count),
    }


def _describe(summary: str, example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": body_schema(MessagesFields), "example": example}}
    answer = {"application/json": {"schema": {"type": "object"}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {
                "200": {"description": "A response as Anthropic's", "content": answer},
                "400": {"description": "A field is wrong or not supported"},
            },
        }
    }
