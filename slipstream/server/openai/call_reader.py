"""An answer taken apart, as it comes, into text and calls. Whoever reads it whole gets the same
parts.

What is no whole call is text, whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from slipstream.server.openai.call_formats import BARE, MARKED, CallFormat

OPEN, CLOSE = MARKED.open, MARKED.close


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON

    def document(self) -> dict[str, object]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Reader(Protocol):
    calls: int  # that were found

    def push(self, text: str, last: bool = False) -> Iterator[str | ToolCall]: ...


def reader_of(written: CallFormat) -> Reader:
    return CallReader() if written is MARKED else BareCallReader()


class BareCallReader:
    """The whole answer is a call, or none of it is."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._is_text = False

    def push(self, text: str, last: bool = False) -> Iterator[str | ToolCall]:
        self._held += text
        begun = self._held.startswith(BARE.open) or BARE.open.startswith(self._held)
        self._is_text = self._is_text or not begun
        if not self._is_text and not last:
            return
        call = None if self._is_text else _parsed(self._held, BARE.arguments)
        if call is not None:
            self.calls += 1
            yield call
        elif self._held:
            yield self._held
        self._held = ""


class CallReader:
    """White space around a call is dropped."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._inside = False  # `_held` is what follows the mark of a call
        self._space = ""  # before that mark
        self._after_call = False

    def push(self, text: str, last: bool = False) -> Iterator[str | ToolCall]:
        self._held += text
        while (part := self._part()) is not None:
            if part:
                yield part
        if last and self._held:
            rest, self._held = self._rest(), ""
            if rest:
                yield rest

    def _part(self) -> str | ToolCall | None:
        """The next part that is sure, perhaps empty; None where more must come first."""
        if self._inside:
            return self._call()
        if self._after_call:
            self._held = self._held.lstrip()
        before, mark, after = self._held.partition(OPEN)
        if mark:
            text = before.rstrip()
            self._held, self._inside, self._space = after, True, before[len(text) :]
            return self._text(text)
        sure = self._held[: len(self._held) - _begun(self._held)].rstrip()
        self._held = self._held[len(sure) :]
        return self._text(sure) if sure else None

    def _text(self, text: str) -> str:
        self._after_call = self._after_call and not text
        return text

    def _call(self) -> ToolCall | None:
        """The end mark may also stand in an argument: a call ends at the first one that makes it
        whole.
        """
        end = self._held.find(CLOSE)
        while end >= 0:
            if (call := _parsed(self._held[:end], MARKED.arguments)) is not None:
                self._held, self._inside, self._after_call = (
                    self._held[end + len(CLOSE) :],
                    False,
                    True,
                )
                self.calls += 1
                return call
            end = self._held.find(CLOSE, end + 1)
        return None

    def _rest(self) -> str | ToolCall:
        """Nothing more comes. A call may end without its mark, where that was a stop word."""
        if not self._inside:
            return "" if self._after_call else self._held
        call = _parsed(self._held, MARKED.arguments)
        if call is None:
            return self._space + OPEN + self._held
        self.calls += 1
        return call


def _begun(text: str) -> int:
    """How many of the last characters may be the beginning of a call's mark."""
    return next(
        (
            size
            for size in range(min(len(OPEN) - 1, len(text)), 0, -1)
            if text.endswith(OPEN[:size])
        ),
        0,
    )


def _parsed(block: str, key: str) -> ToolCall | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    name, arguments = (call.get("name"), call.get(key)) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(
        f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False)
    )
