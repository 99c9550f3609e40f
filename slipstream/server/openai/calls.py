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
from slipstream.server.openai.models import NamedModel
from slipstream.version import VERSION

Document = dict[str, Any]
FINGERPRINT = f"slipstream-{VERSION}"


class Form(Protocol):
    """How one API writes a choice: whole, or in a stream as what opens it, what is new, and what
    ends it.
    """

    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    def whole(self, place: int, choice: Completion) -> Document: ...
    def opening(self, place: int, news: TextOutput) -> Document | None: ...
    def pieces(self, place: int, news: TextOutput) -> Iterator[Document]: ...
    def ending(self, place: int, choice: Completion) -> Document: ...


@dataclass(frozen=True)
class Call:
    model: NamedModel
    form: Form
    texts: Sequence[TextRequest]  # one for each prompt
    ignored: Sequence[str]  # unknown fields
    stream: bool
    include_usage: bool  # as the last chunk of a stream
    id: str
    guided_by: str = ""  # the field that says what the answer must look like
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def of(
        fields: Fields,
        ignored: Sequence[str],
        prefix: str,
        model: NamedModel,
        form: Form,
        texts: Sequence[TextRequest],
        guided_by: str = "",
    ) -> Call:
        usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        return Call(
            model,
            form,
            texts,
            ignored,
            bool(fields.stream),
            usage,
            f"{prefix}-{secrets.token_hex(12)}",
            guided_by,
        )

    def head(self, kind: str) -> Document:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.id,
            "system_fingerprint": FINGERPRINT,
        }

    def document(self, answers: CallAnswers) -> Document:
        choices = [self.form.whole(place, choice) for place, choice in enumerate(answers.choices)]
        return {**self.head(self.form.object), "choices": choices, "usage": answers.usage()}
