"""Answers on their way out: one JSON document, or server-sent events as OpenAI sends them."""

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
    async with aclosing(answers.news()) as arrivals:
        async for _ in arrivals:
            pass
    scores = sum(
        len(choice.log_probs) + sum(map(len, choice.top_log_probs)) for choice in answers.choices
    )
    body = await in_thread_if_long(scores, lambda: msgspec.json.encode(call.document(answers)))
    await exchange.respond(200, body, JSON, ignored_header(call.ignored))


async def answer_stream(call: Call, answers: CallAnswers, exchange: Exchange) -> None:
    """What goes wrong before the first byte is raised; after it, it is the last event."""
    events, started = EventWriter(call, answers), False
    try:
        async with aclosing(answers.news()) as arrivals:
            async for place, news in arrivals:
                if not started:
                    exchange.start_chunks(200, EVENTS, ignored_header(call.ignored))
                    started = True
                if written := events.write(place, news):
                    await exchange.send_chunk(written)
    except Exception as error:
        if not started:
            raise
        problem = as_api_error(error, call.id, call.guided_by)
        await exchange.end_chunks(b"data: " + problem.body() + b"\n\n")
        return
    await exchange.end_chunks(events.end())


class EventWriter:
    """The events of one stream. All but the choice is the same in each, and is put together once."""

    def __init__(self, call: Call, answers: CallAnswers) -> None:
        self._call = call
        self._answers = answers
        self._opened: set[int] = set()
        self._begin = (
            b"data: "
            + msgspec.json.encode(call.head(call.form.chunk_object))[:-1]
            + b',"choices":['
        )
        self._end = (b'],"usage":null}' if call.include_usage else b"]}") + b"\n\n"

    def write(self, place: int, news: TextOutput) -> bytes:
        """Nothing, where the news is only that a part of a character has come."""
        begin, end, choices = self._begin, self._end, self._choices(place, news)
        return b"".join([begin + msgspec.json.encode(choice) + end for choice in choices])

    def _choices(self, place: int, news: TextOutput) -> Iterator[Document]:
        form = self._call.form
        if place not in self._opened:
            self._opened.add(place)
            opening = form.opening(place, news)
            if opening is not None:
                yield opening
        yield from form.pieces(place, news)
        if news.finish_reason:
            yield form.ending(place, self._answers.choices[place])

    def end(self) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = msgspec.json.encode(self._answers.usage())
        return self._begin + b'],"usage":' + usage + b"}\n\n" + DONE
