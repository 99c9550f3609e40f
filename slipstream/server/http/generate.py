"""How the answers of a model become the answer of generate (one) and generate_stream (an event
each).
"""

from __future__ import annotations

from contextlib import aclosing

from slipstream.server.http.asgi import EVENTS, JSON, Send, end_chunks, send_chunk, start_chunked
from slipstream.server.http.generate_response import (
    EXACTLY_ONE,
    EventWriter,
    values_of,
    write_response,
)
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, ServedModel
from slipstream.server.kserve.json_writer import write_error
from slipstream.server.text.pipeline import in_thread_if_long


async def answer_once(model: ServedModel, request: InferRequest, send: Send) -> None:
    """The status is the first answer's, a second answer only changes the body: that is Triton's
    way.
    """
    first: InferResponse | None = None
    more = False
    responses = model.infer(request)
    try:
        async for response in responses:
            if first is not None:
                more = True
                break
            first = response
            if response.error is not None:
                break
    finally:
        await responses.aclose()
    failed = first is not None and first.error is not None
    if first is None or more:
        body = write_error(EXACTLY_ONE)
    else:  # logits may be millions of numbers
        body = await in_thread_if_long(values_of(first), write_response, request, first)
    await start_chunked(send, 400 if failed else 200, JSON)
    await end_chunks(send, body)


async def answer_stream(model: ServedModel, request: InferRequest, send: Send) -> None:
    started, events = False, EventWriter(request)
    async with aclosing(model.infer(request)) as responses:
        try:
            async for response in responses:
                if not started:
                    await start_chunked(send, 200 if response.error is None else 400, EVENTS)
                    started = True
                body = await in_thread_if_long(values_of(response), events.write, response)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except InferenceError as error:
            if not started:
                raise
            await send_chunk(send, b"data: " + write_error(error.message) + b"\n\n")
    if not started:
        await start_chunked(send, 200, EVENTS)
    await end_chunks(send)
