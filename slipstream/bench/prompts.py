"""Prompts for load generators: from a dataset, random tokens, or synthetic text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy

_MAX_TOKEN_ID = 2**31 - 1
_MIN_LENGTH = 1
_COMMON_WORDS = (
    "the of and to in a is that was for it with as his on be at by had not are but from or have an "
    "they which one you were her all she there would their we him been has when who will more no "
    "if out so said what up its about into river market evening window letter bridge harbour "
    "morning garden winter question answer machine measure between carefully suddenly government "
    "information understanding particularly development environment responsibility"
)
# Common words of several lengths. A tokenizer cuts them into about as many pieces as ordinary text.
_VOCABULARY = _COMMON_WORDS.split()


class TokenPrompt(NamedTuple):
    tokens: list[int]
    output_length: int


class DatasetItem(NamedTuple):
    prompt: str
    output_words: int


class Lengths(NamedTuple):
    """A normal distribution of numbers of tokens."""

    mean: float
    deviation: float

    def draw(self, generator: numpy.random.Generator) -> int:
        return max(_MIN_LENGTH, round(generator.normal(self.mean, self.deviation)))


def read_dataset(path: Path) -> list[DatasetItem]:
    """Read a JSON list of objects with `input`, `instruction` and `output`."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
        return [
            DatasetItem(f"{item['input']} {item['instruction']}", len(item["output"].split()))
            for item in items
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a list of objects with input, instruction and output: {error}"
        ) from error


def dataset_prompts(
    items: list[DatasetItem],
    encode: Callable[[str], list[int]],
    tokens_per_word: float,
    longest: int | None,
) -> Iterator[TokenPrompt]:
    """Yield the prompts of a dataset that have at most `longest` tokens."""
    for item in items:
        tokens = encode(item.prompt)
        if longest is None or len(tokens) <= longest:
            yield TokenPrompt(tokens, max(_MIN_LENGTH, int(item.output_words * tokens_per_word)))


def random_prompts(
    count: int,
    lengths: tuple[float, float],
    outputs: tuple[float, float],
    generator: numpy.random.Generator,
) -> Iterator[TokenPrompt]:
    """Yield random tokens. `lengths` and `outputs` are mean and standard deviation."""
    for _ in range(count):
        length = max(_MIN_LENGTH, int(generator.normal(*lengths)))
        output = max(_MIN_LENGTH, int(generator.normal(*outputs)))
        yield TokenPrompt(generator.integers(0, _MAX_TOKEN_ID, length).tolist(), output)


# name: {kind: {length in tokens: weight}}; chat messages, mostly short, some with a long context
HISTOGRAMS = {
    "example": {
        "input": {16: 18, 32: 22, 64: 24, 128: 16, 256: 11, 512: 7, 900: 2},
        "output": {8: 12, 16: 18, 32: 26, 64: 22, 128: 16, 200: 6},
    }
}


def histogram_prompts(
    count: int, key: str, longest: int | None, generator: numpy.random.Generator
) -> Iterator[TokenPrompt]:
    """Yield random tokens whose lengths follow a histogram, without prompts over `longest`."""
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
            yield TokenPrompt(
                generator.integers(0, _MAX_TOKEN_ID, int(length)).tolist(), int(output)
            )


def delays(count: int, rate: float, kind: str, generator: numpy.random.Generator) -> list[float]:
    """Return the seconds to wait before each request. A rate that is not over 0 means none."""
    if rate <= 0:
        return [0.0] * count
    if kind == "constant":
        return [1.0 / rate] * count
    return [float(value) for value in generator.exponential(1.0 / rate, count)]


def synthetic_prompt(
    tokens: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    generator: numpy.random.Generator,
) -> str:
    """Return a text of about `tokens` tokens. The last word is cut, which may add a token."""
    words: list[str] = []
    ids: list[int] = []
    while len(ids) < tokens:
        drawn = generator.choice(_VOCABULARY, size=max(8, tokens - len(ids)))
        words += [str(word) for word in drawn]
        ids = encode(" ".join(words))
    return decode(ids[:tokens])
