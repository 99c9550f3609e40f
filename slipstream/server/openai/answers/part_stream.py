"""The base of readers that split an answer into parts while its text arrives."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import TypeVar

from slipstream.server.openai.answers.parts import Part

Result = TypeVar("Result")
# Steps of a reader: each yields a part, or None where it needs more text.
Steps = Generator[Part | None, None, Result]


class StreamReader:
    """Reads one answer with a generator, so that a stream gives the same parts as a whole text."""

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""  # text that was not read yet
        self._taken = ""  # text that was removed since the start of the last mark
        self._ended = False  # no more text follows
        self._steps = self._read()

    def push(self, text: str, last: bool = False) -> Iterator[Part]:
        self._held += text
        self._ended = self._ended or last
        for part in self._steps:
            if part is not None:
                yield part
            elif not self._ended:
                return

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    def _more(self) -> Steps[bool]:
        """Wait for more text. Return False if the answer has ended."""
        if self._ended:
            return False
        yield None
        return True

    def _take(self, literal: str) -> Steps[bool | None]:
        """Remove a literal from the front of the held text. White space does not count.

        Return False if the text differs, and None if the answer ends within the literal.
        """
        while True:
            size = match_literal(literal, self._held)
            if size is not None:
                self._remove(max(size, 0))
                return size >= 0
            if not (yield from self._more()):
                self._held = ""
                return None

    def _take_all(self, pattern: re.Pattern[str]) -> Steps[str | None]:
        """Remove what matches a pattern from the front of the held text, and return it.

        Return None if the answer ends within it.
        """
        while True:
            found = pattern.match(self._held)
            size = found.end() if found else 0
            if size < len(self._held):
                return self._remove(size)
            if not (yield from self._more()):
                self._held = ""
                return None

    def _remove(self, size: int) -> str:
        removed = self._held[:size]
        self._taken += removed
        self._held = self._held[size:]
        return removed


def match_literal(literal: str, text: str) -> int | None:
    """Return the length of a literal at the front of a text. White space does not count.

    Return -1 if the text differs, and None if it ends within the literal.
    """
    position = 0
    for letter in literal:
        if letter.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return None
        if text[position] != letter:
            # The end of the answer may have cut a character off.
            return None if text[position:] == "\ufffd" else -1
        position += 1
    return position


def partial_mark(mark: str, text: str) -> int:
    """Return how many of the last characters of a text may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
