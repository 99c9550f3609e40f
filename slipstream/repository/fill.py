"""Filling a config.pbtxt template in the way of fill_template.py, and saying what that left undone.

key:value,key:value,…      `\\,` `\\:` and `\\\\` stand for the character itself; a value may be
empty
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.repository.problems import did_you_mean
from slipstream.weights.whole_file import write_whole

# What later releases fill in by themselves; a template without them is not touched.
ALWAYS_FILLED = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<braced>[^{}\s]*)\}|(?P<bare>[_a-zA-Z][_a-zA-Z0-9]*))"
)


class FillError(ValueError):
    """The substitutions cannot be read. The text says which piece."""


@dataclass(frozen=True)
class Filled:
    text: str
    unknown: tuple[str, ...]  # given, but not in the template
    left: tuple[str, ...]  # in the template, but not given; they mean their defaults


def parse_substitutions(text: str) -> dict[str, str]:
    values = {}
    for piece in _split(text, ","):
        key, *rest = _split(piece, ":", once=True)
        if not rest or not key.strip():
            raise FillError(f"'{piece}' is not key:value; pieces are key:value with commas between")
        values[_unescaped(key).strip()] = _unescaped(rest[0])
    return values


def fill_text(text: str, values: Mapping[str, str]) -> Filled:
    named = {match["braced"] or match["bare"] for match in _VARIABLE.finditer(text)} - {None}
    complete = {**ALWAYS_FILLED, **values}
    left: dict[str, None] = {}

    def replace(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["braced"] or match["bare"]
        if name in complete:
            return complete[name]
        left[name] = None
        return match.group()

    filled = _VARIABLE.sub(replace, text)
    return Filled(filled, tuple(key for key in values if key not in named), tuple(left))


def report(file: str, text: str, filled: Filled) -> list[str]:
    """One line for what was given in vain, with the nearest name, and one for what is left."""
    known = [
        match["braced"] or match["bare"]
        for match in _VARIABLE.finditer(text)
        if not match["escaped"]
    ]
    lines = [
        f"{file}: no variable ${{{key}}} in it, '{key}' was not used{did_you_mean(key, set(known))}"
        for key in filled.unknown
    ]
    if filled.left:
        lines.append(
            f"{file}: left unfilled, so they mean their defaults: {', '.join(filled.left)}"
        )
    return lines


def replace_file(path: Path, text: str) -> None:
    write_whole(path, text, path.stat().st_mode & 0o777)


def _split(text: str, mark: str, once: bool = False) -> list[str]:
    """At `mark`, but not where a backslash stands before it."""
    pieces: list[str] = []
    current = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            current += text[position : position + 2]
            position += 2
            continue
        if character == mark and not (once and pieces):
            pieces.append(current)
            current = ""
        else:
            current += character
        position += 1
    return [*pieces, current]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)
