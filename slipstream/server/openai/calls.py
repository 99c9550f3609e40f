"""A call of an endpoint that generates, and the interface that writes its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.http.exchange import Exchange
from slipstream.server.openai.errors import ApiError
from slipstream.server.openai.generation import CallAnswers, CountTokens
from slipstream.server.openai.models import OpenAIModel

Document = dict[str, Any]


class AnswerWriter(Protocol):
    """Writes the answers to one call in the format of its endpoint, whole or as events."""

    def whole(self, answers: CallAnswers) -> bytes: ...

    def events(self, answers: CallAnswers, index: int, output: TextOutput) -> bytes:
        """Return the events of the next output of the answer `index`. There may be none."""
        ...

    def end(self, answers: CallAnswers) -> bytes:
        """Return the last events of a stream without errors."""
        ...

    def failure(self, problem: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        ...


@dataclass(frozen=True)
class Call:
    """A call of an endpoint, read and checked."""

    model: OpenAIModel
    texts: Sequence[TextRequest]  # one request for each prompt
    id: str
    writer: AnswerWriter
    stream: bool
    ignored: Sequence[str] = ()  # unknown fields
    guided_by: str = ""  # request field that carried the grammar
    # sends the answers, if they are sent neither whole nor as events
    send: Callable[[CallAnswers, Exchange], Awaitable[None]] | None = None
    returned: int | None = None  # number of answers to each prompt that are returned; None: all
    prompts_only: bool = False  # prompts are scored, and what is generated is dropped
    count_reasoning: CountTokens | None = None  # counts the reasoning among an answer's tokens
