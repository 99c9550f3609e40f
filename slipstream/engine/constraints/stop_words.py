"""Words that end an answer, found in its tokens as they come. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.constraints.vocabulary import Vocabulary


class StopTexts:
    """One request's words. Where answers go to a client token by token, the server finds them; the
    beams of a search are not seen outside before its end, and one that has said such a word is to
    go no further.
    """

    error = ""

    def __init__(self, vocabulary: Vocabulary, words: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._words = words
        self._longest = max(map(len, words))
        self._marks = frozenset(
            token for token in vocabulary.special if vocabulary.texts[token] in words
        )

    def mask(self, tokens: list[int]) -> bytes:
        return b""  # anything may come

    def complete(self, tokens: list[int]) -> bool:
        """Whether the last token completes a word; the ones before have not, or it would not have
        come.
        """
        if tokens[-1] in self._marks:
            return True
        text, last = b"", len(self._text(tokens[-1]))
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
