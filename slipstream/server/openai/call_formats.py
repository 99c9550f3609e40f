"""How models write a call of a function: the two formats that are read, each told by what a chat
template shows.

Marked, as Hermes, Qwen2.5, Qwen3 and others were trained on; there may be text and further calls
around it:

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

Bare, as Llama 3.1 to 3.3 were; the call is the whole answer:

    {"name": "f", "parameters": {…}}

A guide lets nothing but a whole call of a given function, with arguments by its schema, follow the
beginning of one, so that what is read as a call is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.request import Guide

# Some room to lay the arguments out, but not for ever.
_LAYOUT = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,16}",
    "lenient": False,
    "coerce_one_of": False,
}
_NO_ARGUMENTS = {"properties": {}, "additionalProperties": False}

# how a call of one function begins and ends, and the schema of what is between
Tag = dict[str, Any]


@dataclass(frozen=True)
class CallFormat:
    open: str  # where this begins, a call must follow
    before_name: str  # between that and the function's name
    arguments: str  # the key that they stand under
    end: str  # behind them
    close: str  # what the end of a call can be told by; empty: it is the end of the answer
    shown: Sequence[str]  # in the templates of models that write calls so
    auto: Callable[[CallFormat, Sequence[Tag]], Guide]  # text or calls, as the model likes

    def tag(self, function: dict[str, Any]) -> Tag:
        begin = f'{self.open}{self.before_name}{function["name"]}", "{self.arguments}": '
        schema = function.get("parameters") or _NO_ARGUMENTS
        return {
            "begin": begin,
            "schema": {**schema, "type": "object", "x-guidance": _LAYOUT},
            "end": self.end,
        }


def forced(tags: Sequence[Tag]) -> Guide:
    """One call and nothing else, in the library's own language of grammars."""
    return Guide("ebnf_grammar", "\n".join([f"start: {_any_of(tags)}", *_rules(tags)]))


def _text_and_calls(written: CallFormat, tags: Sequence[Tag]) -> Guide:
    return Guide("structural_tag", json.dumps({"structures": tags, "triggers": [written.open]}))


def _text_or_call(written: CallFormat, tags: Sequence[Tag]) -> Guide:
    """Text may be anything that does not begin as a call does."""
    begun = re.escape(written.open).replace("\\ ", " ")  # the library knows no escaped space
    text = rf"TEXT: /(.|\n)*/ & ~/{begun}(.|\n)*/"
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


def format_of(template: str) -> CallFormat | None:
    """None where the template shows no calls, or others."""
    plain = template.replace('\\"', '"')
    return next((one for one in (MARKED, BARE) if all(part in plain for part in one.shown)), None)
