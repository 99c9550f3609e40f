"""Sends the answers to a call: as one JSON document, or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import msgspec

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.http.exchange import EVENTS, JSON, Exchange
from slipstream.server.openai.calls import Call, Document
from slipstream.server.openai.errors import as_api_error
from slipstream.server.openai.fields import ignored_header
from slipstream.server.openai.generation import CallAnswers
from slipstream.server.text.threads import in_thread_if_long

DONE = b"data: [DONE]\n\n"


async def answer_whole(call: Call, answers: CallAnswers, exchange: Exchange) -> None:
    async with aclosing(answers.outputs()) as arrivals:
        async for _ in arrivals:
            pass
    scores = sum(
        len(choice.log_probs) + sum(map(len, choice.top_log_probs)) for choice in answers.choices
    )
    body = await in_thread_if_long(scores, lambda: msgspec.json.encode(call.document(answers)))
    await exchange.respond(200, body, JSON, ignored_header(call.ignored))


async def answer_stream(call: Call, answers: CallAnswers, exchange: Exchange) -> None:
    """Send the answers as events. An error is raised before the first event, then it is one."""
    events = EventWriter(call, answers)
    started = False
    try:
        async with aclosing(answers.outputs()) as arrivals:
            async for index, output in arrivals:
                if not started:
                    exchange.start_chunks(200, EVENTS, ignored_header(call.ignored))
                    started = True
                if written := events.write(index, output):
                    await exchange.send_chunk(written)
    except Exception as error:
        if not started:
            raise
        problem = as_api_error(error, call.id, call.guided_by)
        await exchange.end_chunks(b"data: " + problem.body() + b"\n\n")
        return
    await exchange.end_chunks(events.end())


class EventWriter:
    """Writes the events of one stream. All parts but the choices are encoded once."""

    def __init__(self, call: Call, answers: CallAnswers) -> None:
        self._call = call
        self._answers = answers
        self._opened: set[int] = set()
        self._begin = (
            b"data: "
            + msgspec.json.encode(call.head(call.choice_writer.chunk_object))[:-1]
            + b',"choices":['
        )
        self._end = (b'],"usage":null}' if call.include_usage else b"]}") + b"\n\n"

    def write(self, index: int, output: TextOutput) -> bytes:
        """Return the events of an output. There are none for a part of a character."""
        events = [
            self._begin + msgspec.json.encode(choice) + self._end
            for choice in self._choices(index, output)
        ]
        return b"".join(events)

    def _choices(self, index: int, output: TextOutput) -> Iterator[Document]:
        choice_writer = self._call.choice_writer
        if index not in self._opened:
            self._opened.add(index)
            opening = choice_writer.opening(index, output)
            if opening is not None:
                yield opening
        yield from choice_writer.pieces(index, output)
        if output.finish_reason:
            yield choice_writer.ending(index, self._answers.choices[index])

    def end(self) -> bytes:
        """Return the last events: the usage, if requested, and the end mark."""
        if not self._call.include_usage:
            return DONE
        usage = msgspec.json.encode(self._answers.usage())
        return self._begin + b'],"usage":' + usage + b"}\n\n" + DONE
