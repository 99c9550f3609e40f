"""The grammars of answers with tool calls.

A grammar ensures that the start of a call is followed by a complete call of a given function, with
arguments that match its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.constraints.guided import GuideError, check_counts, check_guide, compose
from slipstream.engine.sampling_params import Guide
from slipstream.server.openai.answers.grammar import ANY_TEXT, Frame, regex_literal, spell
from slipstream.server.openai.tools import xml_calls
from slipstream.server.openai.tools.call_formats import CallFormat

# Bounded white space between the parts of the arguments.
_LAYOUT = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t]{0,16}",
    "lenient": False,
    "coerce_one_of": False,
}
_NO_ARGUMENTS = {"properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = ("properties", *_DEFINITIONS)
_SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")
# keywords of schemas that say themselves which properties an object has
_OPEN = frozenset(
    {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "anyOf",
        "oneOf",
        "$ref",
        "if",
    }
)

Function = Mapping[str, Any]


@dataclass(frozen=True)
class CallRules:
    """The rules of the calls in an answer."""

    format: CallFormat
    functions: Sequence[Function]
    required: bool  # the answer is a call
    many: bool  # it may have several calls

    def guide(self, frame: Frame, response: Guide | None) -> Guide:
        """Return the grammar of an answer. `response`: the grammar of its text."""
        try:
            start, rules = self._start(frame, response is not None)
        except RecursionError as error:
            raise GuideError("cannot be enforced: a schema nests too deeply") from error
        lark = "\n".join([f"start: {frame.before} ({start})", *rules, *frame.rules])
        beside_calls = {} if response is None or self.required else {"response": response}
        return compose(lark, beside_calls)

    def _start(self, frame: Frame, has_response: bool) -> tuple[str, list[str]]:
        """Return the expression of an answer after its reasoning, and the rules that it needs."""
        rules = [self._all_calls(frame.ids), *self._calls(frame.ids)]
        if self.required:
            return "calls", rules
        if has_response:
            if self.format.whole_answer and not self.format.channels:
                rules = self._object_calls()
            return f"calls | {frame.before_text} @response", rules
        if self.format.whole_answer:
            start, texts = self._calls_or_text(frame)
        else:
            start, texts = self._calls_within_text(frame)
        return start, [*rules, *texts]

    def _calls_or_text(self, frame: Frame) -> tuple[str, list[str]]:
        if self.format.channels:
            return f"calls | {frame.before_text} TEXT", [f"TEXT: {ANY_TEXT}"]
        no_call = rf"~/{regex_literal(self.format.trigger)}(.|\n)*/"
        text = f"TEXT: {ANY_TEXT} & {no_call}{_not_start(frame)}"
        prefix = self.format.prefix
        optional = f"({spell(prefix, frame.ids)})? " if prefix in frame.ids else ""
        return f"{optional}calls | TEXT", [text]

    def _calls_within_text(self, frame: Frame) -> tuple[str, list[str]]:
        """A special token starts a call by itself. A mark that is text is found by a lazy rule."""
        ids = frame.ids
        trigger = self.format.trigger
        texts = [f"FIRST: {ANY_TEXT}{_not_start(frame)}", f"TEXT: {ANY_TEXT}"]
        if trigger in ids:
            return ("FIRST (calls TEXT)*" if self.many else "FIRST calls?"), texts
        any_call = rf"/(.|\n)*{regex_literal(trigger)}/"
        texts += [
            f"TO_FIRST: {any_call}{_not_start(frame)}",
            "to_first[lazy]: TO_FIRST",
            f"to_call[lazy]: {any_call}",
            self._all_calls(ids, trigger),
            *self._calls(ids, trigger),
        ]
        many = "to_first calls_rest (to_call calls_rest)* TEXT"
        return f"FIRST | {many if self.many else 'to_first calls_rest'}", texts

    def _object_calls(self) -> list[str]:
        """Return the rules of calls beside other JSON.

        A lexer cannot tell the text of a call from other JSON with the same beginning. So here a
        call is JSON, too.
        """
        rules = []
        for number, function in enumerate(self.functions):
            schema = closed(function.get("parameters") or _NO_ARGUMENTS)
            definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
            arguments = {key: value for key, value in schema.items() if key not in definitions}
            key = self.format.middle.split('"')[-2]
            call = {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    key: {**arguments, "type": "object"},
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            rules.append(f"call_{number}: {_json({**definitions, **call})}")
        return [f"calls: {' | '.join([f'call_{n}' for n in range(len(self.functions))])}", *rules]

    def _all_calls(self, ids: Mapping[str, int], trigger: str = "") -> str:
        """Return the rule of all calls; with a trigger, of what follows it."""
        opened = spell(self.format.open.removeprefix(trigger), ids)
        close = spell(self.format.close, ids)
        names = [f"call_{number}" for number in range(len(self.functions))]
        calls = " | ".join(names)
        first = calls
        if trigger and not self.format.open:
            first = " | ".join([f"{name}_rest" for name in names])
        more = ""
        # Calls without an end mark for all of them follow each other in the text.
        if self.many and (self.format.close or not trigger):
            more = f"({spell(self.format.between, ids)} ({calls}))*"
        return f"calls{'_rest' if trigger else ''}: {opened} ({first}) {more} {close}"

    def _calls(self, ids: Mapping[str, int], trigger: str = "") -> list[str]:
        """Return the rules of each function's call; with a trigger, of what follows it."""
        rest = "_rest" if trigger else ""
        if trigger and self.format.open:
            return []
        rules = []
        for number, function in enumerate(self.functions):
            head = (self.format.head + function["name"]).removeprefix(trigger)
            start = spell(head + self.format.middle, ids)
            if self.format.call_id in ids:
                call_id = f"({spell(self.format.call_id, ids)} /[a-zA-Z0-9]{{9}}/)?"
                start = f"{spell(head, ids)} {call_id} {spell(self.format.middle, ids)}"
            tail = spell(self.format.tail, ids)
            rules.append(f"call_{number}{rest}: {start} arguments_{number} {tail}")
            if not trigger:
                rules += self._arguments(f"arguments_{number}", function)
        return rules

    def _arguments(self, rule: str, function: Function) -> list[str]:
        schema = function.get("parameters") or _NO_ARGUMENTS
        check_counts(schema)
        if self.format.xml:
            return _xml_arguments(rule, schema)
        return [f"{rule}: {_json(closed({**schema, 'type': 'object'}))}"]


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the listed properties only, unless it says otherwise.

    A model that may add properties invents arguments, which functions do not take.
    """
    if not isinstance(schema, Mapping) or "allOf" in schema:
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            made[key] = {name: closed(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            made[key] = [closed(part) for part in value]
        elif key == "items":
            made[key] = closed(value)
    if isinstance(schema.get("properties"), Mapping) and not _OPEN & schema.keys():
        made["additionalProperties"] = False
    return made


def _not_start(frame: Frame) -> str:
    return rf" & ~/{regex_literal(frame.not_text)}(.|\n)*/" if frame.not_text else ""


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"


def _xml_arguments(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of the parameters of a call, in the order of the schema."""
    check_guide(Guide("json_schema", json.dumps({**schema, "type": "object"})))
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    required = schema.get("required") or []
    names = []
    rules = []
    for number, (name, value) in enumerate((schema.get("properties") or {}).items()):
        parameter = f"{rule}_{number}"
        names.append(parameter if name in required else f"{parameter}?")
        start = json.dumps(f"{xml_calls.OPEN}{name}>\n", ensure_ascii=False)
        end = json.dumps(f"{xml_calls.CLOSE}\n")
        if xml_calls.is_text(value) and value.get("enum"):
            options = " | ".join([json.dumps(text, ensure_ascii=False) for text in value["enum"]])
            rules.append(f"{parameter}: {start} ({options}) {end}")
        elif xml_calls.may_be_text(value):
            rules.append(f"{parameter}: {start} {parameter}_text")
            rules.append(rf"{parameter}_text[lazy]: /(.|\n)*{regex_literal(xml_calls.CLOSE)}\n/")
        else:
            rules.append(f"{parameter}: {start} {_json(closed({**definitions, **value}))} {end}")
    return [f"{rule}: {' '.join(names)}", *rules]
