"""Reads Prometheus' text format, which a server's metrics port writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_SUFFIXES = ("_count", "_sum", "_bucket")


class Sample(NamedTuple):
    """One value. `help` is the text of its metric family."""

    name: str
    help: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> Iterator[Sample]:
    """Return the samples of a text. Raises ValueError for a line that is not in the format.

    Names are those that Triton CLI prints: the name of a counter always ends in `_total`.
    """
    helps: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        comment, _, rest = line.strip().partition(" ")
        if comment == "#":
            keyword, _, rest = rest.strip().partition(" ")
            name, _, value = rest.strip().partition(" ")
            if keyword == "HELP":
                helps[name] = _unescape(value)
            elif keyword == "TYPE":
                kinds[name] = value.strip()
        elif comment:
            yield _parse_sample(line.strip(), helps, kinds)


def _parse_sample(line: str, helps: dict[str, str], kinds: dict[str, str]) -> Sample:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"not a line of Prometheus' text format: '{line}'")
    name = match[1]
    family = name
    for suffix in _SUFFIXES:
        if name not in helps and name.endswith(suffix):
            family = name.removesuffix(suffix)
    if kinds.get(name) == "counter" and not name.endswith("_total"):
        name += "_total"
    return Sample(
        name, helps.get(family, ""), _parse_labels(match[2] or ""), _parse_value(match[3])
    )


def _parse_labels(text: str) -> dict[str, str]:
    labels = {}
    position = 0
    while text[position:].strip():
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"not labels of Prometheus' text format: '{text}'")
        labels[match[1]] = _unescape(match[2])
        position = match.end()
    return labels


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _parse_value(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)
