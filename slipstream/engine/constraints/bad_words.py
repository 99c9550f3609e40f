"""Words that an answer may not contain, however they are cut into tokens. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from slipstream.engine.constraints.vocabulary import Vocabulary


class Spelling:
    """Which tokens contain a text, and which begin with one. Made once for a vocabulary."""

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
        at = self._joined.find(word)
        while at >= 0:
            token = bisect_left(self._ends, at + 1)
            if at + len(word) <= self._ends[token]:  # not across two tokens
                yield token
            at = self._joined.find(word, at + 1)

    def beginning(self, start: bytes) -> Sequence[int]:
        first = bisect_left(self._sorted, start)
        # no token of a text has that many bytes 255
        last = bisect_left(self._sorted, start + b"\xff" * 64)
        return self._order[first:last]


class _Begun:
    """A beginning that some words share: what may come after it, and which words those are."""

    __slots__ = ("_allowed", "depth", "longer", "words")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # in bytes
        self.longer: dict[int, _Begun] = {}  # by the next byte
        self.words: list[bytes] = []
        self._allowed: int | None = None

    def allowed(self, spelling: Spelling) -> int:
        """A bit for each token that completes none of the words here. Found once: a step must not
        wait for it again.
        """
        if self._allowed is None:
            mask = bytearray(b"\xff" * spelling.vocabulary.mask_bytes)
            for word in self.words:
                forbid(mask, spelling.beginning(word[self.depth :]))
            self._allowed = int.from_bytes(mask, "little")
        return self._allowed


class BadTexts:
    """One request's words. A word ends inside a token, or begins before it and ends in it; both are
    known ahead.
    """

    error = ""

    def __init__(self, spelling: Spelling, words: Iterable[bytes]) -> None:
        self._spelling = spelling
        self._nothing = _Begun(0)
        whole = bytearray(b"\xff" * spelling.vocabulary.mask_bytes)
        for word in dict.fromkeys(word for word in words if word):
            forbid(whole, spelling.containing(word))
            self._plant(word)
        self._anywhere = bytes(whole)
        self._followed: list[int] = []
        self._begun: list[_Begun] = []  # the beginnings of words that the text ends with

    def mask(self, tokens: list[int]) -> bytes:
        self._follow(tokens)
        if not self._begun:
            return self._anywhere
        allowed = int.from_bytes(self._anywhere, "little")
        for begun in self._begun:
            allowed &= begun.allowed(self._spelling)
        return allowed.to_bytes(len(self._anywhere), "little")

    def complete(self, tokens: list[int]) -> bool:
        return False

    def _plant(self, word: bytes) -> None:
        begun = self._nothing
        for byte in word[:-1]:  # a whole word is never begun: it is forbidden
            begun = begun.longer.setdefault(byte, _Begun(begun.depth + 1))
            begun.words.append(word)

    def _follow(self, tokens: list[int]) -> None:
        if tokens[: len(self._followed)] != self._followed:  # another way was taken
            self._followed, self._begun = [], []
        texts = self._spelling.texts
        for token in tokens[len(self._followed) :]:
            for byte in texts[token] if token < len(texts) else b"":
                grown = (begun.longer.get(byte) for begun in (*self._begun, self._nothing))
                self._begun = [begun for begun in grown if begun is not None]
        self._followed = list(tokens)


def forbid(mask: bytearray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token >> 3] &= ~(1 << (token & 7)) & 0xFF
