"""Splits an answer into text and tool calls, in a stream or at once, with the same result.

An incomplete call is text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

from slipstream.server.openai.parts import CallArguments, CallStart, Part, PartReader, ToolCall
from slipstream.server.openai.tools.call_formats import BARE, MARKED, CallFormat

OPEN = MARKED.open
CLOSE = MARKED.close


def call_reader(call_format: CallFormat) -> PartReader:
    return CallReader() if call_format is MARKED else BareCallReader()


class BareCallReader:
    """Reads an answer that is either one call or only text."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._is_text = False

    def push(self, text: str, last: bool = False) -> Iterator[Part]:
        self._held += text
        may_be_call = self._held.startswith(BARE.open) or BARE.open.startswith(self._held)
        self._is_text = self._is_text or not may_be_call
        if not self._is_text and not last:
            return
        call = None if self._is_text else _parse(self._held, BARE.arguments)
        if call is not None:
            self.calls += 1
            yield from _call_parts(call)
        elif self._held:
            yield self._held
        self._held = ""


class CallReader:
    """Reads text with marked calls. White space around a call is dropped."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._inside = False  # `_held` follows the start of a call
        self._space = ""  # white space before that start
        self._after_call = False

    def push(self, text: str, last: bool = False) -> Iterator[Part]:
        self._held += text
        while (part := self._part()) is not None:
            yield from _parts(part)
        if last and self._held:
            rest = self._rest()
            self._held = ""
            yield from _parts(rest)

    def _part(self) -> str | ToolCall | None:
        """Return the next complete part, which may be empty, or None if more text must come."""
        if self._inside:
            return self._call()
        if self._after_call:
            self._held = self._held.lstrip()
        before, mark, after = self._held.partition(OPEN)
        if mark:
            text = before.rstrip()
            self._held = after
            self._inside = True
            self._space = before[len(text) :]
            return self._text(text)
        complete = self._held[: len(self._held) - _partial_mark(self._held)].rstrip()
        self._held = self._held[len(complete) :]
        return self._text(complete) if complete else None

    def _text(self, text: str) -> str:
        self._after_call = self._after_call and not text
        return text

    def _call(self) -> ToolCall | None:
        """Return the call at the front of the held text, or None if it is incomplete.

        An argument may contain the end mark, so a call ends at the first mark that completes it.
        """
        end = self._held.find(CLOSE)
        while end >= 0:
            if (call := _parse(self._held[:end], MARKED.arguments)) is not None:
                self._held = self._held[end + len(CLOSE) :]
                self._inside = False
                self._after_call = True
                self.calls += 1
                return call
            end = self._held.find(CLOSE, end + 1)
        return None

    def _rest(self) -> str | ToolCall:
        """Return the held text or call at the end. A call may lack its end mark: a stop word."""
        if not self._inside:
            return "" if self._after_call else self._held
        call = _parse(self._held, MARKED.arguments)
        if call is None:
            return self._space + OPEN + self._held
        self.calls += 1
        return call


def _parts(part: str | ToolCall) -> Iterator[Part]:
    if isinstance(part, ToolCall):
        yield from _call_parts(part)
    elif part:
        yield part


def _call_parts(call: ToolCall) -> Iterator[Part]:
    yield CallStart(call.id, call.name)
    yield CallArguments(call.arguments)


def _partial_mark(text: str) -> int:
    """Return how many of the last characters may be the beginning of a call's start mark."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:size]):
            return size
    return 0


def _parse(block: str, key: str) -> ToolCall | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name = call.get("name")
    arguments = call.get(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(
        f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False)
    )
