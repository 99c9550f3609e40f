"""The conversation of `slipstream chat`: its messages, its settings, its requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.cli.arguments import CommandError
from slipstream.client.connection import HttpConnection, ServerError

# settings of the sampling: the type of each
NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
SYSTEM = "system"
STOP = "stop"
SETTINGS = (*NUMBERS, SYSTEM, STOP)


class Piece(NamedTuple):
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class Figures(NamedTuple):
    """Figures of an answer. Seconds are those of this process."""

    tokens: int
    first_seconds: float  # from the question to the first piece
    seconds: float  # from the first piece to the last

    def __str__(self) -> str:
        rate = (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else 0.0
        shown = f", {rate:.1f} tokens/s" if rate else ""
        count = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        return f"{count}{shown}, first after {self.first_seconds:.2f} s"


class Conversation:
    """The messages so far. The client keeps them: the server keeps nothing."""

    def __init__(self, connection: HttpConnection, model: str, system: str | None) -> None:
        self._connection = connection
        self._model = model
        # greedy: small models, which people try first, often lose the thread when sampled
        self.settings: dict[str, Any] = {"temperature": 0}
        if system is not None:
            self.settings[SYSTEM] = system
        self.cut_short = False  # the last answer ended because the context was full
        self.figures: Figures | None = None  # of the last answer
        self.clear()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of the user and the model."""
        return self._messages

    def clear(self) -> None:
        self._messages: list[dict[str, str]] = []

    def set(self, name: str, text: str) -> None:
        """Change a setting; an empty text means the server's default. Raises CommandError."""
        if name not in SETTINGS:
            raise CommandError(f"there is no setting {name}; there are: {', '.join(SETTINGS)}")
        if not text:
            self.settings.pop(name, None)
        elif name in NUMBERS:
            try:
                self.settings[name] = NUMBERS[name](text)
            except ValueError:
                kind = "a whole number" if NUMBERS[name] is int else "a number"
                raise CommandError(f"{name} must be {kind}, not '{text}'") from None
        else:
            self.settings[name] = text

    def take_back(self) -> str | None:
        """Remove the last question with its answer. Return it; None if there is none."""
        while self._messages:
            message = self._messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def save(self, file: Path) -> None:
        document = {"model": self._model, "settings": self.settings, "messages": self._messages}
        file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")

    def load(self, file: Path) -> None:
        """Continue a conversation that was saved. Raises CommandError for another file."""
        try:
            document = json.loads(file.read_text("utf-8"))
            settings = {name: document["settings"][name] for name in document["settings"]}
            messages = [
                {"role": str(one["role"]), "content": str(one["content"])}
                for one in document["messages"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{file}: not a conversation that /save wrote") from error
        unknown = set(settings) - set(SETTINGS)
        if unknown:
            raise CommandError(f"{file}: unknown setting {min(unknown)}")
        self.settings = settings
        self._messages = messages

    def answer(self, question: str) -> Generator[Piece, None, None]:
        """Yield the pieces of an answer. A stopped answer stays in the conversation as it is."""
        messages = [*self._messages, {"role": "user", "content": question}]
        said = ""
        self.cut_short = False
        self.figures = None
        clock = _Clock()
        stream = self._connection.events("/v1/chat/completions", self._body(messages))
        try:
            with contextlib.closing(stream) as events:
                for choice in itertools.chain.from_iterable(map(_choices, clock.watch(events))):
                    self.cut_short = choice.finish_reason == "length" and not self._limited
                    if choice.reasoning:
                        yield Piece(choice.reasoning, is_reasoning=True)
                    if choice.text:
                        said += choice.text
                        yield Piece(choice.text)
        finally:
            self.figures = clock.figures()
            if said:
                self._messages = [*messages, {"role": "assistant", "content": said}]

    @property
    def _limited(self) -> bool:
        return "max_tokens" in self.settings

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        sampling = {name: value for name, value in self.settings.items() if name != SYSTEM}
        if STOP in sampling:
            sampling[STOP] = [sampling[STOP]]
        system = self.settings.get(SYSTEM)
        beginning = [] if system is None else [{"role": "system", "content": system}]
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
            "messages": [*beginning, *messages],
        }


class _Clock:
    """Measures an answer while its events pass."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first = 0.0
        self._last = 0.0
        self._tokens = 0

    def watch(self, events: Generator[Any, None, None]) -> Generator[Any, None, None]:
        for event in events:
            if isinstance(event, dict) and event.get("usage"):
                self._tokens = int(event["usage"].get("completion_tokens", self._tokens))
            elif isinstance(event, dict) and _has_text(event):
                self._last = time.monotonic()
                self._first = self._first or self._last
                self._tokens += 1
            yield event

    def figures(self) -> Figures | None:
        """Return the figures; None if nothing was said."""
        if not self._first:
            return None
        return Figures(self._tokens, self._first - self._asked, self._last - self._first)


def _has_text(event: dict[str, Any]) -> bool:
    return any(choice.text or choice.reasoning for choice in _choices(event))


class _Choice(NamedTuple):
    text: str
    reasoning: str
    finish_reason: Any


def _choices(event: Any) -> list[_Choice]:
    try:
        return [
            _Choice(
                str(choice["delta"].get("content") or ""),
                str(choice["delta"].get("reasoning_content") or ""),
                choice["finish_reason"],
            )
            for choice in event["choices"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError("the server's answer is not one of OpenAI's API") from error
