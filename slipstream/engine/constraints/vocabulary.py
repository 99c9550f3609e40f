"""The text of each token of a vocabulary, and the tokens of a text. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Vocabulary(NamedTuple):
    """The text of several tokens is the concatenation of their bytes."""

    texts: list[bytes]  # by token; b"" for tokens without text
    special: frozenset[int]  # tokens that are never text, whatever their bytes
    strips_space: bool = False  # a space at the very beginning of a text is removed
    # The model's own tokenizer: returns the tokens of a text that continues another one, which
    # spell exactly this text; None if it has no such tokens.
    encode: Callable[[str], Sequence[int] | None] = lambda text: None

    @property
    def mask_bytes(self) -> int:
        """The size of a mask with one bit per token, in whole 32-bit words."""
        return -(-len(self.texts) // 32) * 4

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens that are not special."""
        return b"".join([self.texts[token] for token in tokens])


class LongestMatch:
    """Tokenises a text from left to right with the longest token that fits. Used for texts that the
    model's own tokenizer does not encode as they are, such as one that it would normalise.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = {
            text: token
            for token, text in enumerate(vocabulary.texts)
            if text and token not in vocabulary.special
        }
        self._longest = max(map(len, self._tokens), default=0)

    def encode(self, text: bytes) -> list[int] | None:
        """Return tokens that spell the text; None if there are none for a part of it."""
        tokens: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._tokens), None)
            if end is None:
                return None
            tokens.append(self._tokens[text[start:end]])
            start = end
        return tokens


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that are the same."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(place for place in range(shorter) if left[place] != right[place])
