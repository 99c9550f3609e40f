"""Finds the end of a JSON object while its text arrives."""

from __future__ import annotations

import re

_NEXT = re.compile(r'["{}\[\]]')
_NEXT_IN_STRING = re.compile(r'["\\]')


class JsonScanner:
    """Counts the brackets of one object or list. It starts at the first bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character follows a backslash

    def scan(self, text: str) -> tuple[int, bool]:
        """Return how many characters belong to the value, and whether it is complete."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_NEXT_IN_STRING if self._in_string else _NEXT).search(text, position)
            if found is None:
                return len(text), False
            position = found.end()
            if self._count(found[0]):
                return position, True
        return len(text), False

    def _count(self, letter: str) -> bool:
        """Follow a letter with a meaning. Return whether it ends the value."""
        if letter == '"':
            self._in_string = not self._in_string
        elif letter == "\\":
            self._escaped = True
        elif letter in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        return self._depth == 0 and not self._in_string and letter in "}]"
