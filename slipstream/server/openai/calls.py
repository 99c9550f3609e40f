"""A call of either endpoint, read and checked, and the interface that writes its choices."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.server.engine_link.engine import TextOutput, TextRequest
from slipstream.server.models.generation_outputs import Completion
from slipstream.server.openai.fields import Fields
from slipstream.server.openai.generation import CallAnswers
from slipstream.server.openai.models import OpenAIModel
from slipstream.version import VERSION

Document = dict[str, Any]
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


@dataclass(frozen=True)
class Call:
    """A call of either endpoint, read and checked."""

    model: OpenAIModel
    choice_writer: ChoiceWriter
    texts: Sequence[TextRequest]  # one request for each prompt
    ignored: Sequence[str]  # unknown fields
    stream: bool
    include_usage: bool  # a stream ends with a chunk for the usage
    id: str
    guided_by: str = ""  # request field that carried the grammar
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def create(
        fields: Fields,
        ignored: Sequence[str],
        prefix: str,
        model: OpenAIModel,
        choice_writer: ChoiceWriter,
        texts: Sequence[TextRequest],
        guided_by: str = "",
    ) -> Call:
        usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        return Call(
            model,
            choice_writer,
            texts,
            ignored,
            bool(fields.stream),
            usage,
            f"{prefix}-{secrets.token_hex(12)}",
            guided_by,
        )

    def head(self, kind: str) -> Document:
        """Return the fields that the response and every chunk of a stream begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.id,
            "system_fingerprint": FINGERPRINT,
        }

    def document(self, answers: CallAnswers) -> Document:
        """Return the whole response."""
        choices = [
            self.choice_writer.whole(index, choice) for index, choice in enumerate(answers.choices)
        ]
        return {
            **self.head(self.choice_writer.object),
            "choices": choices,
            "usage": answers.usage(),
        }
