"""Texts that end an output, found in its tokens as they are sampled. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.constraints.vocabulary import Vocabulary


class StopTexts:
    """The stop words of one beam search.

    For other requests the server looks for stop words in the text it sends. Beams are sent only
    when the search ends, so the engine has to end a beam at a stop word.
    """

    error = ""

    def __init__(self, vocabulary: Vocabulary, words: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._words = words
        self._longest = max(map(len, words))
        self._special_words = frozenset(
            token for token in vocabulary.special if vocabulary.texts[token] in words
        )

    def mask(self, tokens: list[int]) -> bytes:
        return b""  # all tokens are allowed

    def complete(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a word. Earlier tokens completed none."""
        if tokens[-1] in self._special_words:
            return True
        text = b""
        last = len(self._text(tokens[-1]))
        for place in range(len(tokens) - 1, -1, -1):
            text = self._text(tokens[place]) + text
            if len(text) >= last + self._longest - 1:
                break
        else:
            text = text.removeprefix(b" ") if self._vocabulary.strips_space else text
        return last > 0 and any(word in text for word in self._words)

    def _text(self, token: int) -> bytes:
        special = token in self._vocabulary.special or token >= len(self._vocabulary.texts)
        return b"" if special else self._vocabulary.texts[token]
