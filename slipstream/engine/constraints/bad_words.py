"""Texts that an output may not contain, however they are tokenised. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from slipstream.engine.constraints.vocabulary import Vocabulary


class Spelling:
    """An index of a vocabulary: the tokens that contain a text, and those that begin with one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.texts = [
            b"" if token in vocabulary.special else text
            for token, text in enumerate(vocabulary.texts)
        ]
        self._order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._sorted = [self.texts[token] for token in self._order]
        self._joined = b"".join(self.texts)
        self._ends = list(accumulate(len(text) for text in self.texts))

    def containing(self, word: bytes) -> Iterator[int]:
        """Yield the tokens whose text contains the word."""
        at = self._joined.find(word)
        while at >= 0:
            token = bisect_left(self._ends, at + 1)
            if at + len(word) <= self._ends[token]:  # not across two tokens
                yield token
            at = self._joined.find(word, at + 1)

    def beginning(self, start: bytes) -> Sequence[int]:
        """Return the tokens whose text begins with `start`."""
        first = bisect_left(self._sorted, start)
        # No text token has 64 bytes of value 255.
        last = bisect_left(self._sorted, start + b"\xff" * 64)
        return self._order[first:last]


class _Prefix:
    """A node of a trie of words: a prefix that some words share, and those words."""

    __slots__ = ("_allowed", "depth", "longer", "words")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # in bytes
        self.longer: dict[int, _Prefix] = {}  # by the next byte
        self.words: list[bytes] = []
        self._allowed: int | None = None

    def allowed(self, spelling: Spelling) -> int:
        """Return one bit for each token that completes none of the words here.

        The mask is computed once, because a step waits for it.
        """
        if self._allowed is None:
            mask = bytearray(b"\xff" * spelling.vocabulary.mask_bytes)
            for word in self.words:
                forbid(mask, spelling.beginning(word[self.depth :]))
            self._allowed = int.from_bytes(mask, "little")
        return self._allowed


class BadTexts:
    """The forbidden words of one request.

    A word lies within one token, or begins before a token and ends in it. Both are known before the
    token is sampled.
    """

    error = ""

    def __init__(self, spelling: Spelling, words: Iterable[bytes]) -> None:
        self._spelling = spelling
        self._root = _Prefix(0)
        whole = bytearray(b"\xff" * spelling.vocabulary.mask_bytes)
        for word in dict.fromkeys(word for word in words if word):
            forbid(whole, spelling.containing(word))
            self._insert(word)
        self._anywhere = bytes(whole)
        self._seen: list[int] = []  # the output tokens that `_open` covers
        self._open: list[_Prefix] = []  # prefixes of words that the text ends with

    def mask(self, tokens: list[int]) -> bytes:
        self._follow(tokens)
        if not self._open:
            return self._anywhere
        allowed = int.from_bytes(self._anywhere, "little")
        for prefix in self._open:
            allowed &= prefix.allowed(self._spelling)
        return allowed.to_bytes(len(self._anywhere), "little")

    def complete(self, tokens: list[int]) -> bool:
        return False

    def _insert(self, word: bytes) -> None:
        prefix = self._root
        for byte in word[:-1]:  # the text never ends with a whole word, because it is forbidden
            prefix = prefix.longer.setdefault(byte, _Prefix(prefix.depth + 1))
            prefix.words.append(word)

    def _follow(self, tokens: list[int]) -> None:
        if tokens[: len(self._seen)] != self._seen:  # another beam
            self._seen = []
            self._open = []
        texts = self._spelling.texts
        for token in tokens[len(self._seen) :]:
            for byte in texts[token] if token < len(texts) else b"":
                longer = (prefix.longer.get(byte) for prefix in (*self._open, self._root))
                self._open = [prefix for prefix in longer if prefix is not None]
        self._seen = list(tokens)


def forbid(mask: bytearray, tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens."""
    for token in tokens:
        mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
