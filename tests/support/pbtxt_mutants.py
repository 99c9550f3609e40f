"""Damaged copies of a config.pbtxt: one key dropped, misspelt or with a value of another type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_FIELD = re.compile(r"(?P<name>[a-z_]+)(?P<colon>\s*:\s*|\s+)(?=[\"$A-Za-z0-9\-\[{])")
_CLOSING = {"{": "}", "[": "]"}


class Mutant(NamedTuple):
    kind: str  # "dropped", "misspelt" or "retyped"
    key: str
    line: int  # line of the key in the undamaged text
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    for match in _fields(text):
        start = match.start()
        name = match["name"]
        end = _value_end(text, match.end())
        line = text.count("\n", 0, start) + 1
        comma = re.compile(r"\s*,?").match(text, end)
        assert comma is not None
        yield Mutant("dropped", name, line, text[:start] + text[comma.end() :])
        misspelt = name[:-1] + "x" + name[-1]
        yield Mutant("misspelt", name, line, text[:start] + misspelt + text[start + len(name) :])
        value = text[match.end() : end]
        other = "{ }" if value[0] not in "{[" else '"text"'
        colon = match["colon"] if ":" in match["colon"] else ": "
        yield Mutant("retyped", name, line, text[:start] + name + colon + other + text[end:])


def _fields(text: str) -> Iterator[re.Match[str]]:
    position = 0
    while match := re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*|' + _FIELD.pattern).search(
        text, position
    ):
        position = match.end()
        if match["name"]:
            yield match


def _value_end(text: str, start: int) -> int:
    if text[start] in _CLOSING:
        depth = 0
        position = start
        for token in re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]]|\$?\{|\}').finditer(text, start):
            depth += {"[": 1, "{": 1, "${": 1, "]": -1, "}": -1}.get(token.group(), 0)
            position = token.end()
            if not depth:
                break
        return position
    match = re.compile(r'"(?:[^"\\]|\\.)*"|\$\{[^}]*\}|[-\w.]+').match(text, start)
    assert match is not None
    return match.end()
