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
    """One value, with the name, the text and the type of its metric family."""

    name: str
    help: str
    labels: dict[str, str]
    value: float
    family: str
    kind: str  # such as "counter"; "unknown" without a type


def parse_metrics(text: str) -> Iterator[Sample]:
    """Return the samples of a text. Raises ValueError for a line that is not in the format.

    Names are those that Triton CLI prints: the name of a counter always ends in `_total`, that of
    its family never.
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
    family = _family(name, kinds)
    kind = kinds.get(family, "unknown")
    text = helps.get(family, "")
    if kind == "counter":
        family = family.removesuffix("_total")
        name = f"{family}_total"
    return Sample(name, text, _parse_labels(match[2] or ""), _parse_value(match[3]), family, kind)


def _family(name: str, kinds: dict[str, str]) -> str:
    """Return the family as the text names it: a histogram's samples end in a suffix."""
    for suffix in _SUFFIXES:
        family = name.removesuffix(suffix)
        if family != name and kinds.get(family) in ("histogram", "summary"):
            return family
    return name


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
