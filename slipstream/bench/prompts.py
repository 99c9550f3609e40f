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
        return [
            Item(f"{item['input']} {item['instruction']}", len(item["output"].split()))
            for item in items
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a list of objects with input, instruction and output: {error}"
        ) from error


def from_dataset(
    items: list[Item],
    encode: Callable[[str], list[int]],
    tokens_per_word: float,
    longest: int | None,
) -> Iterator[Work]:
    for item in items:
        tokens = encode(item.prompt)
        if longest is None or len(tokens) <= longest:
            yield Work(tokens, max(_FEWEST, int(item.output_words * tokens_per_word)))


def random_work(
    count: int,
    lengths: tuple[float, float],
    outputs: tuple[float, float],
    generator: numpy.random.Generator,
) -> Iterator[Work]:
    """`lengths` and `outputs` are mean and standard deviation; 0 makes all alike."""
    for _ in range(count):
        length = max(_FEWEST, int(generator.normal(*lengths)))
        output = max(_FEWEST, int(generator.normal(*outputs)))
        yield Work(generator.integers(0, _MOST_TOKEN_ID, length).tolist(), output)


# Lengths in tokens and how often they occur: chat turns, most of them short, some with a long
# context.
HISTOGRAMS = {
    "example": {
        "input": {16: 18, 32: 22, 64: 24, 128: 16, 256: 11, 512: 7, 900: 2},
        "output": {8: 12, 16: 18, 32: 26, 64: 22, 128: 16, 200: 6},
    }
}


def histogram_work(
    count: int, key: str, longest: int | None, generator: numpy.random.Generator
) -> Iterator[Work]:
    """Random tokens whose numbers follow a histogram; prompts over `longest` are left out."""
    shapes = {}
    for kind, bins in HISTOGRAMS[key].items():
        kept = {
            length: weight
            for length, weight in bins.items()
            if kind == "output" or (longest or length) >= length
        }
        weights = numpy.array(list(kept.values()), dtype=float)
        shapes[kind] = generator.choice(
            list(kept) or [0], count, p=weights / weights.sum() if kept else None
        )
    for length, output in zip(shapes["input"], shapes["output"], strict=True):
        if length:
            yield Work(generator.integers(0, _MOST_TOKEN_ID, int(length)).tolist(), int(output))


def delays(count: int, rate: float, kind: str, generator: numpy.random.Generator) -> list[float]:
    """Seconds to wait before each request; a rate that is not over 0 means none."""
    if rate <= 0:
        return [0.0] * count
    if kind == "constant":
        return [1.0 / rate] * count
    return [float(value) for value in generator.exponential(1.0 / rate, count)]
