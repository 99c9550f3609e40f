"""The format of a model's answers: how they are constrained, and how they are read into parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slipstream.engine.constraints.guided import compose
from slipstream.engine.sampling_params import Guide
from slipstream.server.openai.answers.grammar import NO_FRAME, Frame, special_ids
from slipstream.server.openai.answers.harmony import (
    AnalysisCounter,
    HarmonyReader,
    channel_frame,
    shown_ids,
    uses_channels,
)
from slipstream.server.openai.answers.parts import PartReader, PlainReader
from slipstream.server.openai.answers.reasoning import (
    ReasoningCounter,
    ReasoningReader,
    find_reasoning,
    reasoning_frame,
    reasoning_start,
)
from slipstream.server.openai.generation import CountTokens
from slipstream.server.openai.tools.call_grammar import CallRules
from slipstream.server.openai.tools.call_reader import CallReader
from slipstream.server.openai.tools.request import ToolUse
from slipstream.server.openai.tools.xml_calls import XmlCallReader
from slipstream.server.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    new_reader: Callable[[], PartReader] = PlainReader
    shown_ids: frozenset[int] = frozenset()  # special tokens that the reader needs
    frame: Frame = NO_FRAME
    rules: CallRules | None = None
    count_reasoning: CountTokens | None = None  # None: the model does not reason

    def guide(self, response: Guide | None) -> Guide | None:
        """Return the grammar of an answer. `response`: the grammar of its text."""
        if self.rules is not None:
            return self.rules.guide(self.frame, response)
        if response is None or not self.frame.rules:
            return response
        start = f"start: {self.frame.before} {self.frame.before_text} @response"
        return compose("\n".join([start, *self.frame.rules]), {"response": response})


def find_answer_format(
    tools: ToolUse,
    tokenizer: Tokenizer,
    prompt: list[int],
    text_is_guided: bool,
    reasoning_parser: str = "",
) -> AnswerFormat:
    """Return the format of the answers to a prompt, as the chat template shows it.

    `reasoning_parser`: the name of the format of reasoning; empty: the one of the template.
    """
    if uses_channels(tools.template):
        frame = channel_frame(tokenizer)
        return AnswerFormat(
            HarmonyReader, shown_ids(tokenizer), frame, tools.rules, AnalysisCounter(tokenizer)
        )
    answers = _without_reasoning(tools, tokenizer, text_is_guided)
    reasoning = find_reasoning(tools.template, reasoning_parser)
    if reasoning is None:
        return answers
    start = reasoning_start(reasoning, tokenizer, prompt)
    frame = reasoning_frame(reasoning, start, tokenizer)
    ids = {**frame.ids, **answers.frame.ids}
    return AnswerFormat(
        lambda: ReasoningReader(reasoning, start, answers.new_reader()),
        frozenset(ids.values()),
        replace(frame, ids=ids),
        tools.rules,
        ReasoningCounter(reasoning, start, tokenizer),
    )


def _without_reasoning(tools: ToolUse, tokenizer: Tokenizer, text_is_guided: bool) -> AnswerFormat:
    if tools.rules is None:
        return AnswerFormat()
    call_format = tools.rules.format
    only_calls = tools.rules.required
    ids = special_ids(tokenizer, call_format.marks)
    schemas = {
        function["name"]: function.get("parameters") or {} for function in tools.rules.functions
    }

    def new_reader() -> PartReader:
        if call_format.xml:
            return XmlCallReader(call_format, schemas, only_calls)
        return CallReader(call_format, only_calls, any_layout=text_is_guided)

    return AnswerFormat(new_reader, frozenset(ids.values()), Frame(ids=ids), tools.rules)
