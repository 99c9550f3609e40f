"""Reasoning: what a model thinks before it answers, between marks such as <think> and </think>."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from slipstream.server.openai.answers.grammar import (
    ANY_TEXT,
    Frame,
    regex_literal,
    special_ids,
    spell,
)
from slipstream.server.openai.answers.part_stream import Steps, StreamReader, partial_mark
from slipstream.server.openai.answers.parts import PartReader, Reasoning
from slipstream.server.text.tokenizer import Tokenizer

# Tokens at the end of a prompt that show whether the answer starts within reasoning.
PROMPT_END = 16
OPENING_TOKENS = 16  # most tokens of the mark that opens the reasoning


@dataclass(frozen=True)
class ReasoningFormat:
    names: Sequence[str]  # vLLM's names of the format
    open: str
    close: str

    @property
    def marks(self) -> tuple[str, str]:
        return self.open, self.close


REASONING_FORMATS = (
    ReasoningFormat(("deepseek_r1", "qwen3"), "<think>", "</think>"),
    ReasoningFormat(("mistral",), "[THINK]", "[/THINK]"),
)


@lru_cache
def find_reasoning(template: str, name: str = "") -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template shows, or None if it shows none.

    With a name, return the format of this name, even if the template does not show it. An unknown
    name means none.
    """
    for reasoning in REASONING_FORMATS:
        if name in reasoning.names if name else reasoning.close in template:
            return reasoning
    return None


class ReasoningStart(Enum):
    """The part in which an answer starts."""

    INSIDE = auto()  # the prompt has opened the reasoning
    BEFORE = auto()  # the answer may open it
    AFTER = auto()  # the prompt has closed it


def reasoning_start(
    reasoning: ReasoningFormat, tokenizer: Tokenizer, prompt: list[int]
) -> ReasoningStart:
    end = tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False).rstrip()
    if end.endswith(reasoning.open):
        return ReasoningStart.INSIDE
    return ReasoningStart.AFTER if end.endswith(reasoning.close) else ReasoningStart.BEFORE


def reasoning_frame(
    reasoning: ReasoningFormat, start: ReasoningStart, tokenizer: Tokenizer
) -> Frame:
    """Return the grammar of reasoning before an answer: any text up to the end mark."""
    ids = special_ids(tokenizer, reasoning.marks)
    if start is ReasoningStart.AFTER:
        return Frame(ids=ids)
    rules = [r"SPACE: /[ \n]{0,4}/"]
    if reasoning.close in ids:
        rules += [f"thought: REASONING {spell(reasoning.close, ids)}", f"REASONING: {ANY_TEXT}"]
    else:
        rules.append(rf"thought[lazy]: /(.|\n)*{regex_literal(reasoning.close)}/")
    if start is ReasoningStart.INSIDE:
        return Frame(before="thought SPACE", rules=rules, ids=ids)
    opened = spell(reasoning.open, ids)
    not_text = "" if reasoning.open in ids else reasoning.open
    return Frame(before=f"({opened} thought SPACE)?", not_text=not_text, rules=rules, ids=ids)


@dataclass(frozen=True)
class ReasoningCounter:
    """Counts the tokens of the reasoning in an answer, with its marks."""

    reasoning: ReasoningFormat
    start: ReasoningStart
    tokenizer: Tokenizer

    def __call__(self, tokens: Sequence[int]) -> int:
        if self.start is ReasoningStart.AFTER:
            return 0
        opened = self._decode(tokens[:OPENING_TOKENS]).lstrip().startswith(self.reasoning.open)
        if self.start is ReasoningStart.BEFORE and not opened:
            return 0
        mark = self.tokenizer.encode(self.reasoning.close, add_special_tokens=False)
        if len(mark) == 1 and mark[0] in tokens:
            return tokens.index(mark[0]) + 1
        if not self._closes(tokens):
            return len(tokens)
        return bisect_left(range(len(tokens)), True, key=lambda end: self._closes(tokens[:end]))

    def _closes(self, tokens: Sequence[int]) -> bool:
        return self.reasoning.close in self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


class ReasoningReader(StreamReader):
    """Reads reasoning, then the answer. White space around the reasoning is dropped."""

    def __init__(
        self, reasoning: ReasoningFormat, start: ReasoningStart, answer: PartReader
    ) -> None:
        super().__init__()
        self._reasoning = reasoning
        self._start = start
        self._answer = answer

    def _read(self) -> Steps[None]:
        inside = self._start is ReasoningStart.INSIDE
        if self._start is ReasoningStart.BEFORE:
            inside = yield from self._opens()
        if inside:
            yield from self._read_reasoning()
            yield from self._skip_space()
        while True:
            text = self._held
            self._held = ""
            for part in self._answer.push(text, last=self._ended):
                self.calls = self._answer.calls
                yield part
            if not (yield from self._more()):
                return

    def _opens(self) -> Steps[bool]:
        """Return whether the answer opens the reasoning. Remove the mark."""
        while True:
            start = self._held.lstrip()
            if start.startswith(self._reasoning.open):
                self._held = start.removeprefix(self._reasoning.open)
                return True
            if not self._reasoning.open.startswith(start) or not (yield from self._more()):
                return False

    def _read_reasoning(self) -> Steps[None]:
        close = self._reasoning.close
        yield from self._skip_space()
        while True:
            text, mark, after = self._held.partition(close)
            if not mark:
                text = text[: len(text) - partial_mark(close, text)]
            sent = text.rstrip()
            if sent:
                yield Reasoning(sent)
            if mark:
                self._held = after
                return
            self._held = self._held[len(sent) :]
            if not (yield from self._more()):
                self._held = ""
                return

    def _skip_space(self) -> Steps[None]:
        while not (start := self._held.lstrip()):
            self._held = ""
            if not (yield from self._more()):
                return
        self._held = start
