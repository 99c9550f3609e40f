"""Fill a config.pbtxt template like fill_template.py, and report what was not filled.

The substitutions are `key:value,key:value,…`. The escapes `\\,`, `\\:` and `\\\\` stand for the
character itself. A value may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.repository.problems import did_you_mean
from slipstream.repository.releases.render import find_variable
from slipstream.weights.whole_file import write_whole

# Variables that later releases fill by themselves. A template without them is not changed.
ALWAYS_FILLED = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<braced>[^{}\s]*)\}|(?P<bare>[_a-zA-Z][_a-zA-Z0-9]*))"
)


class FillError(ValueError):
    """The substitutions cannot be parsed. The text names the piece that is wrong."""


@dataclass(frozen=True)
class FillResult:
    text: str
    unknown: tuple[str, ...]  # substitutions that the template has no variable for
    left: tuple[str, ...]  # variables without a substitution; the server uses their defaults
    unused: frozenset[str]  # variables that no substitution was given for


def parse_substitutions(text: str) -> dict[str, str]:
    values = {}
    for piece in _split(text, ","):
        key, *rest = _split(piece, ":", once=True)
        if not rest or not key.strip():
            raise FillError(f"'{piece}' is not key:value; separate key:value pairs with commas")
        values[_unescape(key).strip()] = _unescape(rest[0])
    return values


def fill_text(text: str, values: Mapping[str, str]) -> FillResult:
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
    unknown = tuple(key for key in values if key not in named)
    return FillResult(filled, unknown, tuple(left), frozenset(named - values.keys()))


def report(file: str, filled: FillResult) -> list[str]:
    """Return one line per unused substitution, and one line that lists the unfilled variables."""
    lines = []
    for key in filled.unknown:
        reason = _other_templates(key) or did_you_mean(key, filled.unused)
        lines.append(f"{file}: no variable ${{{key}}} in it, '{key}' was not used{reason}")
    if filled.left:
        lines.append(f"{file}: not filled, so their defaults are used: {', '.join(filled.left)}")
    return lines


def _other_templates(key: str) -> str:
    """Return the templates that have a variable, as the end of a sentence, or nothing."""
    places = []
    for model, releases in find_variable(key).items():
        first = releases[0]
        last = releases[-1]
        places.append(f"{model} ({first if first == last else f'{first} to {last}'})")
    return f"; other templates have it: {', '.join(places)}" if places else ""


def replace_file(path: Path, text: str) -> None:
    write_whole(path, text, path.stat().st_mode & 0o777)


def _split(text: str, mark: str, once: bool = False) -> list[str]:
    """Split at `mark`, except where a backslash precedes it."""
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


def _unescape(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)
