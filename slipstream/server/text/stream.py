"""The text of one request as its tokens arrive: whole characters only, cut at a stop word.

A stop word is found wherever its pieces are cut, and no part of it is sent before it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.server.text.tokenizer import Tokenizer


class StopWords:
    """An Aho-Corasick automaton of stop words, which any number of texts may share.

    A state is the longest end of the text so far that begins a stop word. Its depth is the number
    of characters that must be held back.
    """

    def __init__(self, words: Sequence[str], shown: bool = False) -> None:
        """`shown`: a text ends with the stop word that stops it."""
        self.shown = shown
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        # length of the longest stop word that ends in this state, 0 for none
        self.longest_word = [0]
        self.shorter = [0]  # state of the next longest end of the text that begins a stop word
        self.first_chars = frozenset(word[0] for word in words if word)
        for word in words:
            self._add(word)
        self._link()

    def _add(self, word: str) -> None:
        state = 0
        for char in word:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.longest_word.append(0)
                self.shorter.append(0)
            state = self.children[state][char]
        self.longest_word[state] = len(word)

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                self.shorter[child] = self.step(self.shorter[state], char)
                self.longest_word[child] = (
                    self.longest_word[child] or self.longest_word[self.shorter[child]]
                )
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.children[state]:
            state = self.shorter[state]
        return self.children[state].get(char, 0)


class StopWordFilter:
    """Passes text on up to the first stop word, or up to its end where stop words are shown.

    The match that begins earliest wins. A match inside a longer one that is still possible waits
    for it: with "bc" and "abcd", the text "abc" is undecided.
    """

    def __init__(self, words: Sequence[str] | StopWords) -> None:
        self._automaton = words if isinstance(words, StopWords) else StopWords(words)
        self._state = 0
        self._read = 0  # characters that the automaton has read
        self._released = 0  # characters passed on
        self._held = ""  # characters held back, which follow those
        # start of the earliest stop word found so far; an earlier one may still come
        self.match_start: int | None = None
        self._match_end = 0  # end of the same stop word
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be passed on now; none once `stopped` is set."""
        if self.stopped:
            return ""
        self._held += text
        if self._state or not self._automaton.first_chars.isdisjoint(text):
            self._search(text)
        else:
            self._read += len(text)
        return self._release()

    def finish(self) -> str:
        """Return the text that was held back for a stop word that was not completed."""
        self._state = 0
        self.stopped = self.stopped or self.match_start is not None
        return self._release()

    def _search(self, text: str) -> None:
        automaton = self._automaton
        for char in text:
            self._state = automaton.step(self._state, char)
            self._read += 1
            word = automaton.longest_word[self._state]
            if word and (self.match_start is None or self._read - word < self.match_start):
                self.match_start, self._match_end = self._read - word, self._read
            earliest_possible = self._read - automaton.depth[self._state]
            if self.match_start is not None and earliest_possible >= self.match_start:
                self.stopped = True
                return

    def _release(self) -> str:
        if self.stopped and self.match_start is not None:
            end = self._match_end if self._automaton.shown else self.match_start
            released = self._held[: end - self._released]
            self._held = ""
        else:
            cut = len(self._held) - self._automaton.depth[self._state]
            released, self._held = self._held[:cut], self._held[cut:]
        self._released += len(released)
        return released


class TextStream:
    """Tokens in, text out. The joined pieces are the decoded tokens up to the first stop word.

    `stopped` says whether a stop word was found. `tokens_used` is the number of tokens up to its
    end, and otherwise the number of all tokens.
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
        # start of the stop word, and the number of tokens up to its end
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
        for token in tokens:  # one by one, to know which one completes a stop word
            if self._filter.stopped:
                break
            self._seen += 1
            if token not in self._skipped:
                pieces.append(self._pass(self._filter, self._detokenizer.push((token,))))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
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
