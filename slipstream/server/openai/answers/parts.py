"""The parts of an answer to a conversation: text, reasoning and tool calls.

Every chat endpoint reads an answer into these parts and writes them in its own format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thought before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a tool call. Its arguments follow."""

    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON of the arguments of the call that started last."""

    text: str


Part = str | Reasoning | CallStart | CallArguments


class PartReader(Protocol):
    """Splits one answer into parts, piece by piece or at once, with the same result."""

    calls: int  # number of calls started

    def push(self, text: str, last: bool = False) -> Iterator[Part]:
        """Yield the parts of the next piece of text. `last`: no more text follows."""
        ...


class PlainReader:
    """Reads an answer that is only text."""

    calls = 0

    def push(self, text: str, last: bool = False) -> Iterator[Part]:
        if text:
            yield text


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""  # JSON

    def document(self) -> dict[str, object]:
        """Return the call in the format of chat completions."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass
class WholeMessage:
    """A complete answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> WholeMessage:
        for part in parts:
            match part:
                case str():
                    self.text += part
                case Reasoning():
                    self.reasoning += part.text
                case CallStart():
                    self.calls.append(ToolCall(part.id, part.name))
                case CallArguments():
                    self.calls[-1].arguments += part.text
        return self
