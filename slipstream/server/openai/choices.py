"""Writes the answers to chat and text completions: one choice for each answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec

from slipstream.server.engine_link.engine import TextOutput
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.calls import Document
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.fields import Fields
from slipstream.server.openai.generation import CallAnswers
from slipstream.version import VERSION

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"slipstream-{VERSION}"


class ChoiceWriter(Protocol):
    """Writes the choices of one endpoint: whole, or as the first, middle and last chunks."""

    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    def whole(self, index: int, choice: Completion) -> Document: ...
    def opening(self, index: int, output: TextOutput) -> Document | None: ...
    def pieces(self, index: int, output: TextOutput) -> Iterator[Document]: ...
    def ending(self, index: int, choice: Completion) -> Document: ...


class ChoicesWriter:
    """Writes one call's answers. All parts of events but the choices are encoded once."""

    def __init__(
        self, identity: str, model: str, choice_writer: ChoiceWriter, include_usage: bool
    ) -> None:
        """`include_usage`: a stream ends with a chunk for the usage."""
        self.id = identity
        self._choice_writer = choice_writer
        self._include_usage = include_usage
        self._head: Document = {
            "id": identity,
            "object": choice_writer.object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._opened: set[int] = set()
        chunk_head = self._head | {"object": choice_writer.chunk_object}
        self._begin = b"data: " + msgspec.json.encode(chunk_head)[:-1] + b',"choices":['
        self._end = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"

    @staticmethod
    def create(
        prefix: str, model: str, choice_writer: ChoiceWriter, fields: Fields
    ) -> ChoicesWriter:
        options = fields.stream_options
        include_usage = options is not None and bool(options.include_usage)
        identity = f"{prefix}-{secrets.token_hex(12)}"
        return ChoicesWriter(identity, model, choice_writer, include_usage)

    def whole(self, answers: CallAnswers) -> bytes:
        choices = [
            self._choice_writer.whole(index, choice) for index, choice in enumerate(answers.choices)
        ]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": answers.usage()})

    def events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        events = [
            self._begin + msgspec.json.encode(choice) + self._end
            for choice in self._choices(answers, index, output)
        ]
        return b"".join(events)

    def _choices(self, answers: CallAnswers, index: int, output: TextOutput) -> Iterator[Document]:
        if index not in self._opened:
            self._opened.add(index)
            opening = self._choice_writer.opening(index, output)
            if opening is not None:
                yield opening
        yield from self._choice_writer.pieces(index, output)
        if output.finish_reason:
            yield self._choice_writer.ending(index, answers.choices[index])

    def end(self, answers: CallAnswers) -> bytes:
        """Return the last events: the usage, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        usage = msgspec.json.encode(answers.usage())
        return self._begin + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, problem: ApiError) -> bytes:
        return b"data: " + problem.body() + b"\n\n"
