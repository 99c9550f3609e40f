"""Requests for the old benchmark scripts: from a dataset, or with random tokens of given lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy

_MOST_TOKEN_ID = 2**31 - 1
_FEWEST = 1


class Work(NamedTuple):
    tokens: list[int]
    output_length: int


class Item(NamedTuple):
    prompt: str
    output_words: int


def read_dataset(path: Path) -> list[Item]:
    """A JSON list of objects with `input`, `instruction` and `output`."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
        return [Item(f"{item['input']} {item['instruction']}", len(item["output"].split())) for item in items]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a list of objects with input, instruction and output: {error}") from error


def from_dataset(
    items: list[Item], encode: Callable[[str], list[int]], tokens_per_word: float, longest: int | None
) -> Iterator[Work]:
    for item in items:
        tokens = encode(item.prompt)
        if longest is None or len(tokens) <= longest:
            yield Work(tokens, max(_FEWEST, int(item.output_words * tokens_per_word)))


def random_work(
    count: int, lengths: tuple[float, float], outputs: tuple[float, float], generator: numpy.random.Generator
) -> Iterator[Work]:
    """`lengths` and `outputs` are mean and standard deviation; 0 makes all alike."""
    for _ in range(count):
        length = max(_FEWEST, int(generator.normal(*lengths)))
        output = max(_FEWEST, int(generator.normal(*outputs)))
        yield Work(generator.integers(0, _MOST_TOKEN_ID, length).tolist(), output)


def delays(count: int, rate: float, kind: str, generator: numpy.random.Generator) -> list[float]:
    """Seconds to wait before each request; a rate that is not over 0 means none."""
    if rate <= 0:
        return [0.0] * count
    if kind == "constant":
        return [1.0 / rate] * count
    return [float(value) for value in generator.exponential(1.0 / rate, count)]
