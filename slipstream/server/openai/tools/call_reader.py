"""Splits an answer into text and tool calls, in a stream or at once, with the same result.

The arguments of a call are sent while they arrive. A call that the end of the answer cuts off keeps
the arguments that it has; without a complete name it is dropped.
"""

from __future__ import annotations

import re
import secrets
import string

from slipstream.server.openai.answers.part_stream import (
    Steps,
    StreamReader,
    match_literal,
    partial_mark,
)
from slipstream.server.openai.answers.parts import CallArguments, CallStart
from slipstream.server.openai.tools.call_formats import CallFormat
from slipstream.server.openai.tools.json_scanner import JsonScanner

_NAME = re.compile(r"[\w.-]*")
_SPACE = re.compile(r"\s*")
_SHORT_ID = string.ascii_letters + string.digits


def new_call_id(call_format: CallFormat) -> str:
    if call_format.short_ids:
        return "".join([secrets.choice(_SHORT_ID) for _ in range(9)])
    return f"call_{secrets.token_hex(12)}"


class CallReader(StreamReader):
    """Reads text with calls whose arguments are JSON. White space around a call is dropped."""

    def __init__(
        self, call_format: CallFormat, only_calls: bool = False, any_layout: bool = False
    ) -> None:
        """`only_calls`: the answer has no text.

        `any_layout`: white space may be anywhere in a call that is the whole answer.
        """
        super().__init__()
        self._only_calls = only_calls
        self._any_layout = any_layout
        self._format = call_format
        self._trigger = call_format.trigger
        self._space = ""  # white space before the call
        self._after_call = False

    def _read(self) -> Steps[None]:
        if self._format.whole_answer:
            if (yield from self._find_first_call()):
                yield from self._read_calls()
            yield from self._pass_text()
            return
        while (yield from self._find_call()):
            yield from self._read_calls()

    def _find_call(self) -> Steps[bool]:
        """Pass the text before the next call on. Return whether there is a call."""
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
            before, mark, _ = self._held.partition(self._trigger)
            text = before if mark else before[: len(before) - partial_mark(self._trigger, before)]
            text = text.rstrip()
            if text:
                yield from self._send(len(text))
            if mark:
                self._space = before[len(text) :]
                self._held = self._held[len(self._space) :]
                return True
            if not (yield from self._more()):
                self._drop_partial_mark()
                yield from self._pass_text()
                return False

    def _drop_partial_mark(self) -> None:
        """Drop the beginning of a mark at the end of the answer. A few letters may be text."""
        size = partial_mark(self._trigger, self._held)
        if self._only_calls or self._after_call or 2 * size >= len(self._trigger):
            self._held = self._held[: len(self._held) - size].rstrip()

    def _find_first_call(self) -> Steps[bool]:
        """Return whether the answer starts with a call."""
        prefix = self._format.prefix
        while True:
            start = self._held.removeprefix(prefix)
            size = match_literal(self._trigger, start)
            if not self._any_layout and not start.startswith(self._trigger):
                size = None if self._trigger.startswith(start) else -1
            if size is not None and size >= 0:
                self._held = start
                return True
            may_start = size is None or prefix.startswith(self._held)
            if not may_start or not (yield from self._more()):
                return False

    def _pass_text(self) -> Steps[None]:
        """Pass all remaining text on."""
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
            if self._held:
                yield from self._send(len(self._held))
            if not (yield from self._more()):
                return

    def _send(self, size: int) -> Steps[None]:
        text = self._held[:size]
        self._held = self._held[size:]
        self._after_call = False
        if not self._only_calls:
            yield text

    def _read_calls(self) -> Steps[None]:
        """Read the calls at the front of the held text. If there is none, their mark is text."""
        self._taken = ""
        called = yield from self._take(self._format.open)
        if called:
            called = yield from self._read_call()
        if called is False:
            self._held = self._space + self._taken + self._held
            yield from self._send(len(self._space + self._trigger))
        while called and self._format.close:
            if (yield from self._take(self._format.close)) is not False:
                return
            yield from self._take(self._format.between)
            called = yield from self._read_call()
        if called is None:
            self._held = ""  # the rest of a call that is cut off

    def _read_call(self) -> Steps[bool | None]:
        """Read one call. Return False if there is none, and None if the answer ends within it."""
        taken = yield from self._take(self._format.head)
        if not taken:
            return taken
        name = yield from self._take_all(_NAME)
        if not name:
            return None if name is None else False
        call_id = ""
        if self._format.call_id and (yield from self._take(self._format.call_id)):
            call_id = (yield from self._take_all(_NAME)) or ""
        taken = yield from self._take(self._format.middle)
        if taken:
            taken = yield from self._find_arguments()
        if taken is False:
            return False
        self.calls += 1
        yield CallStart(call_id or new_call_id(self._format), name)
        if taken is None or not (yield from self._read_arguments(name)):
            return None
        self._after_call = True
        ended = yield from self._take(self._format.tail)
        return None if ended is None else True

    def _find_arguments(self) -> Steps[bool | None]:
        """Return whether an object comes next, and None if the answer ends before it."""
        if (yield from self._take_all(_SPACE)) is None:
            return None
        return self._held.startswith("{")

    def _read_arguments(self, name: str) -> Steps[bool]:
        """Read the arguments of a call of this function. Return whether they are complete."""
        scanner = JsonScanner()
        while True:
            size, complete = scanner.scan(self._held)
            if size:
                yield CallArguments(self._held[:size])
                self._held = self._held[size:]
            if complete:
                return True
            if not (yield from self._more()):
                return False
