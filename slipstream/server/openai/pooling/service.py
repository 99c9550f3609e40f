"""Answers the endpoints that pool prompts: one vector for each prompt, written as one document."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from slipstream.engine.sampling_params import SamplingParams
from slipstream.server.engine_link.engine import AdapterUse, TextRequest
from slipstream.server.http.exchange import JSON, Exchange
from slipstream.server.http.routes import TracedExchange
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import InferRequest, ModelRegistry
from slipstream.server.openai.errors import ApiError, as_api_error
from slipstream.server.openai.fields import ignored_header
from slipstream.server.openai.generation import infer_request
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.openai.streaming import read_request_body
from slipstream.server.text.threads import in_thread_if_long
from slipstream.server.tracing.tracing import EMBEDDINGS


@dataclass(frozen=True)
class PooledPrompt:
    vector: np.ndarray  # float32 [size]
    tokens: int  # of the prompt


@dataclass(frozen=True)
class PoolingCall:
    """A call of an endpoint, read and checked."""

    id: str
    model: OpenAIModel
    prompts: Sequence[list[int]]
    kind: str  # of pooling
    write: Callable[[Sequence[PooledPrompt]], bytes]  # returns the response's body
    ignored: Sequence[str] = ()  # unknown fields


@dataclass(frozen=True)
class CallSource:
    """The objects that a function needs to read a call from a body."""

    registry: ModelRegistry
    default_pooling: str  # kind for models that declare none; empty: they have no embeddings


ReadPoolingCall = Callable[[bytes, CallSource], Awaitable[PoolingCall]]


class PoolingService:
    def __init__(self, registry: ModelRegistry, state: ServerState, context: ServerContext) -> None:
        self._state = state
        self._context = context
        self._source = CallSource(registry, context.embedding_pooling)

    async def answer(self, exchange: Exchange, read_call: ReadPoolingCall) -> None:
        began = time.monotonic_ns()
        body = await read_request_body(exchange, self._state, self._context)
        with exchange.cancel_on_disconnect():
            call = await read_call(body, self._source)
            trace = self._context.trace.begin(call.model.entry.name, exchange.headers, EMBEDDINGS)
            with TracedExchange(exchange, trace, began):
                if trace is not None:
                    trace.stamp("HTTP_RECV_END")
                adapter = call.model.adapter()
                traces = [trace, *[trace and trace.sibling() for _ in call.prompts[1:]]]
                requests = [
                    infer_request(
                        call.model, _text_request(prompt, call.kind, adapter), call.id, one
                    )
                    for prompt, one in zip(call.prompts, traces, strict=True)
                ]
                try:
                    pooled = await _pool_all(call.model, requests)
                except InferenceError as error:
                    raise as_api_error(error, call.id) from error
                size = sum(len(one.vector) for one in pooled)
                document = await in_thread_if_long(size, call.write, pooled)
                await exchange.respond(200, document, JSON, ignored_header(call.ignored))


def _text_request(prompt: list[int], kind: str, adapter: AdapterUse | None) -> TextRequest:
    sampling = SamplingParams(max_tokens=1, pooling=kind)
    return TextRequest(prompt, sampling, ignore_end=True, adapter=adapter)


async def _pool_all(model: OpenAIModel, requests: Sequence[InferRequest]) -> list[PooledPrompt]:
    """Run the requests, as many at a time as the engine has rows: more would fill its queue."""
    info = model.text.engine.generator.client.info
    running = asyncio.Semaphore(1 if info is None else info.max_rows)

    async def pool(request: InferRequest) -> PooledPrompt:
        async with running:
            return await _pool(model, request)

    tasks = [asyncio.create_task(pool(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _pool(model: OpenAIModel, request: InferRequest) -> PooledPrompt:
    vector = b""
    tokens = 0
    async with aclosing(model.entry.model.infer(request)) as responses:
        async for response in responses:
            if response.error is not None:
                raise response.error
            output = response.text_output
            if output is not None:
                tokens = output.prompt_tokens
                vector = output.scores.pooled if output.scores is not None else vector
    if not vector:
        raise ApiError("the engine returned no vector", status=500)
    return PooledPrompt(np.frombuffer(vector, dtype=np.float32), tokens)
