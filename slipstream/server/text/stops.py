"""Stop words in a text that comes in pieces: found wherever the pieces are cut, never given out in
part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopWords:
    """Aho-Corasick: a state is the longest end of the text so far that begins some stop word.

    Its depth is therefore exactly how much of the text must be held back. Any number of texts may
    use one.
    """

    def __init__(self, words: Sequence[str], shown: bool = False) -> None:
        """shown: the one that ends a text is the last of it."""
        self.shown = shown
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        # length of the longest stop word that ends in this state, 0 for none
        self.longest_word = [0]
        self.shorter = [0]  # the next longest end of the text that begins a stop word
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
    """Lets text through up to the first stop word, or up to its end where those are shown.

    The match that begins earliest wins. A word found inside a longer one that is still possible
    waits for it: with "bc" and "abcd", the text "abc" is undecided.
    """

    def __init__(self, words: Sequence[str] | StopWords) -> None:
        self._automaton = words if isinstance(words, StopWords) else StopWords(words)
        self._state = 0
        self._read = 0  # characters the automaton has seen
        self._given = 0  # characters given out
        self._held = ""  # the characters after those
        # of the earliest stop word found; may still move to the left
        self.match_start: int | None = None
        self._match_end = 0  # of the same
        self.stopped = False

    def push(self, text: str) -> str:
        """What can be given out now. Nothing more comes once `stopped`."""
        if self.stopped:
            return ""
        self._held += text
        if self._state or not self._automaton.first_chars.isdisjoint(text):
            self._search(text)
        else:
            self._read += len(text)
        return self._release()

    def finish(self) -> str:
        """The text is over: what was held for a word that did not come is text."""
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
            released = self._held[: end - self._given]
            self._held = ""
        else:
            cut = len(self._held) - self._automaton.depth[self._state]
            released, self._held = self._held[:cut], self._held[cut:]
        self._given += len(released)
        return released
