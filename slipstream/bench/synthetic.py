"""Prompts of a wanted number of tokens, and their answers' lengths, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy

_FEWEST = 1
# Common words of several lengths: tokenizers cut them into about as many pieces as those of
# ordinary text.
_TEXT = (
    "the of and to in a is that was for it with as his on be at by had not are but from or have an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into "
    "river market evening window letter bridge harbour morning garden winter question answer machine measure between "
    "carefully suddenly government information understanding particularly development environment responsibility"
)


class Lengths(NamedTuple):
    mean: float
    deviation: float

    def draw(self, generator: numpy.random.Generator) -> int:
        return max(_FEWEST, round(generator.normal(self.mean, self.deviation)))


def synthetic_prompt(
    tokens: int,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    generator: numpy.random.Generator,
) -> str:
    """A text of so many tokens: words until there are enough, cut off; a cut word may come out a
    token longer.
    """
    words: list[str] = []
    vocabulary = _TEXT.split()
    ids: list[int] = []
    while len(ids) < tokens:
        words += [
            str(word) for word in generator.choice(vocabulary, size=max(8, tokens - len(ids)))
        ]
        ids = encode(" ".join(words))
    return decode(ids[:tokens])
