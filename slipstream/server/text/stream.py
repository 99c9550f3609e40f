"""The text of one request as it is written: whole characters, and no part of a stop word that is
not to be shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.text.stops import StopWordFilter, StopWords
from slipstream.server.text.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out. Joined, the pieces are the decoded tokens up to the first stop word, or
    with it.

    `stopped` says that a stop word was met; `tokens_used` how many tokens it took to complete it,
    and otherwise how many there were.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: Sequence[str] | StopWords = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._filter: StopWordFilter | None = None
        if stop_words:
            words = stop_words if isinstance(stop_words, StopWords) else StopWords(stop_words)
            self._filter = StopWordFilter(words) if words.first_chars else None
        self._seen = 0  # tokens
        # where the stop word begins, and the tokens seen by then
        self._match: tuple[int, int] | None = None

    @property
    def stopped(self) -> bool:
        return self._filter is not None and self._filter.stopped

    @property
    def tokens_used(self) -> int:
        return self._match[1] if self.stopped and self._match else self._seen

    def push(self, tokens: Sequence[int]) -> str:
        self._tokenizer.check_ids(tokens)
        if self._filter is None:
            self._seen += len(tokens)
            return self._detokenizer.push([token for token in tokens if token not in self._skipped])
        pieces = []
        for token in tokens:  # one by one, to know which of them completes a stop word
            if self._filter.stopped:
                break
            self._seen += 1
            if token not in self._skipped:
                pieces.append(self._pass(self._filter, self._detokenizer.push((token,))))
        return "".join(pieces)

    def finish(self) -> str:
        """No more tokens come. What was held back is given out, unless it was a stop word."""
        rest = self._detokenizer.finish()
        if self._filter is None:
            return rest
        return self._pass(self._filter, rest) + self._filter.finish()

    def _pass(self, stop_filter: StopWordFilter, text: str) -> str:
        passed = stop_filter.push(text)
        start = stop_filter.match_start
        if start is not None and (self._match is None or self._match[0] != start):
            self._match = (start, self._seen)
        return passed
