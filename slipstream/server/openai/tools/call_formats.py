"""The two formats of tool calls. A model's chat template shows which of them it uses.

Marked (Hermes, Qwen2.5, Qwen3 and others). Text and further calls may surround a call:

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

Bare (Llama 3.1 to 3.3). The call is the whole answer:

    {"name": "f", "parameters": {…}}

A grammar ensures that the start of a call is followed by a complete call of a given function, with
arguments that match its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.sampling_params import Guide

# Bounded white space between the parts of the arguments.
_LAYOUT = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,16}",
    "lenient": False,
    "coerce_one_of": False,
}
_NO_ARGUMENTS = {"properties": {}, "additionalProperties": False}

# The beginning and end of a call of one function, and the schema of its arguments.
Tag = dict[str, Any]


@dataclass(frozen=True)
class CallFormat:
    open: str  # start of a call
    before_name: str  # text between `open` and the function's name
    arguments: str  # key of the arguments
    end: str  # text after the arguments
    close: str  # end mark of a call; empty: a call ends with the answer
    shown: Sequence[str]  # parts of chat templates that use this format
    auto: Callable[[CallFormat, Sequence[Tag]], Guide]  # grammar for tool_choice "auto"

    def tag(self, function: dict[str, Any]) -> Tag:
        begin = f'{self.open}{self.before_name}{function["name"]}", "{self.arguments}": '
        schema = function.get("parameters") or _NO_ARGUMENTS
        return {
            "begin": begin,
            "schema": {**schema, "type": "object", "x-guidance": _LAYOUT},
            "end": self.end,
        }


def force_call(tags: Sequence[Tag]) -> Guide:
    """Return the grammar of exactly one call."""
    return Guide("ebnf_grammar", "\n".join([f"start: {_any_of(tags)}", *_rules(tags)]))


def _text_and_calls(call_format: CallFormat, tags: Sequence[Tag]) -> Guide:
    """Return the grammar of text with any number of calls."""
    structures = {"structures": tags, "triggers": [call_format.open]}
    return Guide("structural_tag", json.dumps(structures))


def _text_or_call(call_format: CallFormat, tags: Sequence[Tag]) -> Guide:
    """Return the grammar of one call, or of any text that does not start like a call."""
    start = re.escape(call_format.open).replace("\\ ", " ")  # llguidance takes no escaped space
    text = rf"TEXT: /(.|\n)*/ & ~/{start}(.|\n)*/"
    return Guide("ebnf_grammar", "\n".join([f"start: {_any_of(tags)} | TEXT", text, *_rules(tags)]))


def _any_of(tags: Sequence[Tag]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tags)))


def _rules(tags: Sequence[Tag]) -> list[str]:
    return [
        f"call_{number}: {json.dumps(tag['begin'])} arguments_{number} {json.dumps(tag['end'])}\n"
        f"arguments_{number}: %json {json.dumps(tag['schema'])}"
        for number, tag in enumerate(tags)
    ]


MARKED = CallFormat(
    "<tool_call>",
    '\n{"name": "',
    "arguments",
    "}\n</tool_call>",
    "</tool_call>",
    ("tools", "<tool_call>", '"name"', '"arguments"'),
    _text_and_calls,
)
BARE = CallFormat(
    '{"name": "', "", "parameters", "}", "", ("tools", '{"name": ', '"parameters": '), _text_or_call
)


def find_format(template: str) -> CallFormat | None:
    """Return the format of calls that a chat template shows, or None if it shows neither."""
    plain = template.replace('\\"', '"')
    for call_format in (MARKED, BARE):
        if all(part in plain for part in call_format.shown):
            return call_format
    return None
