"""Answers of gpt-oss: messages on the channels analysis (reasoning), commentary and final (text).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

A call is a message on the channel commentary with a recipient:

    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from slipstream.server.openai.answers.grammar import (
    ANY_TEXT,
    Frame,
    regex_literal,
    special_ids,
    spell,
)
from slipstream.server.openai.answers.part_stream import Steps, StreamReader, partial_mark
from slipstream.server.openai.answers.parts import CallArguments, CallStart, Part, Reasoning
from slipstream.server.openai.tools.call_formats import HARMONY
from slipstream.server.openai.tools.call_reader import new_call_id
from slipstream.server.text.tokenizer import Tokenizer

_MESSAGE = "<|message|>"
_HEADER_STARTS = ("<|", "to=")  # an answer follows "<|start|>assistant"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join([re.escape(mark) for mark in _ENDS]))
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MARKS = (*HARMONY.marks, *_ENDS)


@lru_cache
def uses_channels(template: str) -> bool:
    return "<|channel|>" in template and _MESSAGE in template


def shown_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(special_ids(tokenizer, _MARKS).values())


def channel_frame(tokenizer: Tokenizer) -> Frame:
    """Return the grammar of the messages before a call or a text."""
    ids = special_ids(tokenizer, _MARKS)
    channel = spell("<|channel|>", ids)
    message = spell(_MESSAGE, ids)
    following = spell("<|start|>assistant", ids)
    rules = [f'message: {channel} ("analysis" | "commentary") {message} said {following}']
    if "<|end|>" in ids:
        rules += [f"said: SAID {spell('<|end|>', ids)}", f"SAID: {ANY_TEXT}"]
    else:
        rules.append(rf"said[lazy]: /(.|\n)*{regex_literal('<|end|>')}/")
    final = spell(f"<|channel|>final{_MESSAGE}", ids)
    return Frame(before="message*", before_text=final, rules=rules, ids=ids)


@dataclass(frozen=True)
class AnalysisCounter:
    """Counts the tokens of the messages on the channel analysis, without their headers."""

    tokenizer: Tokenizer

    def __call__(self, tokens: Sequence[int]) -> int:
        ids = special_ids(self.tokenizer, _MARKS)
        ends = {ids[mark] for mark in _ENDS if mark in ids}
        count = 0
        start = 0  # of the header, then of the message
        in_analysis = False
        for place, token in enumerate(tokens):
            if token == ids.get(_MESSAGE):
                header = self.tokenizer.decode(tokens[start:place], skip_special_tokens=False)
                channel = _CHANNEL.search(header)
                in_analysis = channel is not None and channel[1] == "analysis"
                start = place + 1
            elif token in ends:
                count += place - start if in_analysis else 0
                in_analysis = False
                start = place + 1
        return count + (len(tokens) - start if in_analysis else 0)


class HarmonyReader(StreamReader):
    def __init__(self) -> None:
        super().__init__()
        self._sent: set[type] = set()  # kinds of parts so far

    def _read(self) -> Steps[None]:
        if not (yield from self._starts_with_header()):
            yield from self._read_body(str)
        while (header := (yield from self._read_header())) is not None:
            called = _FUNCTION.search(header)
            if called is not None:
                self.calls += 1
                yield CallStart(new_call_id(HARMONY), called[1])
                yield from self._read_body(CallArguments)
                continue
            channel = _CHANNEL.search(header)
            is_text = "to=" not in header and (channel is None or channel[1] != "analysis")
            yield from self._read_body(str if is_text else Reasoning)

    def _starts_with_header(self) -> Steps[bool]:
        """Return whether the answer starts with a message, or continues one of the prompt."""
        while True:
            start = self._held.lstrip()
            if any(start.startswith(mark) for mark in _HEADER_STARTS):
                return True
            may_start = any(mark.startswith(start) for mark in _HEADER_STARTS)
            if not may_start or not (yield from self._more()):
                return may_start

    def _read_header(self) -> Steps[str | None]:
        """Return the text before the next message, or None if there is none."""
        while _MESSAGE not in self._held:
            if not (yield from self._more()):
                return None
        header, _, self._held = self._held.partition(_MESSAGE)
        return header

    def _read_body(self, kind: type[CallArguments | Reasoning | str]) -> Steps[None]:
        """Read a message up to its end. Messages of one kind are joined by newlines."""
        separator = "\n" if kind in self._sent and kind is not CallArguments else ""
        while True:
            end = _END.search(self._held)
            size = end.start() if end else len(self._held) - self._partial_end()
            if size:
                part: Part = kind(separator + self._held[:size])
                self._sent.add(kind)
                separator = ""
                yield part
            if end:
                self._held = self._held[end.end() :]
                return
            self._held = self._held[size:]
            if not (yield from self._more()):
                self._held = ""
                return

    def _partial_end(self) -> int:
        return max(partial_mark(mark, self._held) for mark in _ENDS)
