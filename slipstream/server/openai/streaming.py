"""Runs the calls of endpoints that generate, and sends their answers whole or as events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from slipstream.engine.messages import Scores
from slipstream.server.http.exchange import EVENTS, JSON, Exchange
from slipstream.server.http.routes import TracedExchange
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError, Unavailable
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry, RequestTrace
from slipstream.server.openai.calls import Call
from slipstream.server.openai.errors import ApiError, as_api_error
from slipstream.server.openai.fields import ignored_header
from slipstream.server.openai.generation import CallAnswers, infer_request
from slipstream.server.text.threads import in_thread_if_long

ReadCall = Callable[[bytes, ModelRegistry], Awaitable[Call]]


async def read_request_body(
    exchange: Exchange, state: ServerState, context: ServerContext
) -> bytes:
    """Return the body of a request for work, unless the server is stopping."""
    if state.draining:
        raise Unavailable("the server is shutting down and takes no new requests")
    if exchange.header(b"content-encoding").lower() not in (b"", b"identity"):
        raise ApiError("Unsupported content-encoding, only 'identity' is supported.")
    return await exchange.read_body(context.http_max_input_bytes)


class CallService:
    """Answers calls. Access was checked before; errors are ApiErrors, for the route to write."""

    def __init__(self, registry: ModelRegistry, state: ServerState, context: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._context = context

    async def answer(self, exchange: Exchange, read_call: ReadCall, operation: str) -> None:
        """`operation`: the name of this kind of call in traces."""
        began = time.monotonic_ns()
        body = await read_request_body(exchange, self._state, self._context)
        with exchange.cancel_on_disconnect():
            call = await read_call(body, self._registry)
            trace = self._context.trace.begin(call.model.entry.name, exchange.headers, operation)
            with TracedExchange(exchange, trace, began):
                await self._generate(call, trace, exchange)

    async def _generate(self, call: Call, trace: RequestTrace | None, exchange: Exchange) -> None:
        if trace is not None:
            trace.stamp("HTTP_RECV_END")
        traces = [trace, *[trace and trace.sibling() for _ in call.texts[1:]]]
        requests = [
            infer_request(call.model, text, call.id, trace)
            for text, trace in zip(call.texts, traces, strict=True)
        ]
        answers = CallAnswers(
            call.model,
            requests,
            call.texts[0].sequences,
            call.returned,
            call.prompts_only,
            call.count_reasoning,
        )
        try:
            if call.send is not None:
                await call.send(answers, exchange)
            elif call.stream:
                await answer_stream(call, answers, exchange)
            else:
                await answer_whole(call, answers, exchange)
        except InferenceError as error:
            raise as_api_error(error, call.id, call.guided_by) from error


async def answer_whole(call: Call, answers: CallAnswers, exchange: Exchange) -> None:
    async with aclosing(answers.outputs()) as arrivals:
        async for _ in arrivals:
            pass
    scores = sum(
        len(choice.log_probs)
        + sum(map(len, choice.top_log_probs))
        + _prompt_scores(call, choice.scores)
        for choice in answers.choices
    )
    body = await in_thread_if_long(scores, call.writer.whole, answers)
    await exchange.respond(200, body, JSON, ignored_header(call.ignored))


def _prompt_scores(call: Call, scores: Scores | None) -> int:
    """Return the number of scores of a prompt."""
    if scores is None:
        return 0
    return len(scores.prompt_log_probs) * (1 + call.texts[0].sampling.top_prompt_log_probs)


async def answer_stream(call: Call, answers: CallAnswers, exchange: Exchange) -> None:
    """Send the answers as events. An error is raised before the first event, then it is one."""
    started = False
    opened: set[int] = set()  # choices whose first event, which has the prompt's scores, is sent
    try:
        async with aclosing(answers.outputs()) as arrivals:
            async for index, output in arrivals:
                if not started:
                    exchange.start_chunks(200, EVENTS, ignored_header(call.ignored))
                    started = True
                size = 0 if index in opened else _prompt_scores(call, output.scores)
                opened.add(index)
                if written := await in_thread_if_long(
                    size, call.writer.events, answers, index, output
                ):
                    await exchange.send_chunk(written)
    except Exception as error:
        if not started:
            raise
        problem = as_api_error(error, call.id, call.guided_by)
        await exchange.end_chunks(call.writer.failure(problem))
        return
    await exchange.end_chunks(call.writer.end(answers))
