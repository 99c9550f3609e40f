"""Calls whose arguments are XML elements, as Qwen3-Coder writes them:

    <parameter=city>
    Rome
    </parameter>

A text has no quotes and no escapes. Other values are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from slipstream.server.openai.answers.part_stream import Steps, partial_mark
from slipstream.server.openai.answers.parts import CallArguments
from slipstream.server.openai.tools.call_formats import CallFormat
from slipstream.server.openai.tools.call_reader import CallReader

OPEN = "<parameter="
CLOSE = "\n</parameter>"
_PARAMETER_NAME = re.compile(r"[^>]*")

# The JSON schemas of the arguments, by function.
Schemas = Mapping[str, Mapping[str, Any]]


_JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def is_text(schema: Any) -> bool:
    """Return whether every value of a schema is a text."""
    return _types(schema) == {"string"}


def may_be_text(schema: Any) -> bool:
    """Return whether a value of a schema may be a text."""
    return "string" in _types(schema)


def _types(schema: Any) -> set[str]:
    """Return the JSON types of the values of a schema. Without a type, any is possible."""
    if not isinstance(schema, Mapping):
        return {"string", *_JSON_TYPES.values()}
    kind = schema.get("type")
    if kind is not None:
        return set(kind) if isinstance(kind, list) else {kind}
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return set().union(*map(_types, options))
    if isinstance(schema.get("enum"), list):
        return {_JSON_TYPES.get(type(value), "string") for value in schema["enum"]}
    if {"$ref", "const", "allOf"} & schema.keys():
        return set(_JSON_TYPES.values())  # written as JSON, texts with quotes
    return {"string", *_JSON_TYPES.values()}


class XmlCallReader(CallReader):
    def __init__(self, call_format: CallFormat, schemas: Schemas, only_calls: bool = False) -> None:
        super().__init__(call_format, only_calls)
        self._schemas = schemas

    def _find_arguments(self) -> Steps[bool | None]:
        yield from ()
        return True

    def _read_arguments(self, name: str) -> Steps[bool]:
        properties = self._schemas.get(name, {}).get("properties", {})
        separator = "{"
        while (found := (yield from self._take(OPEN))) is True:
            parameter = yield from self._take_all(_PARAMETER_NAME)
            if parameter is None:
                return False
            yield from self._take(">")
            key = json.dumps(parameter, ensure_ascii=False)
            yield CallArguments(f"{separator}{key}: ")
            separator = ", "
            if not (yield from self._read_value(properties.get(parameter))):
                return False
        if found is None:
            return False
        yield CallArguments("}" if separator == ", " else "{}")
        return True

    def _read_value(self, schema: Any) -> Steps[bool]:
        """Read a value up to its end mark. Return whether it is complete."""
        if is_text(schema):
            return (yield from self._read_text())
        while CLOSE.lstrip() not in self._held:
            if not (yield from self._more()):
                return False
        value, _, self._held = self._held.partition(CLOSE.lstrip())
        yield CallArguments(_as_json(value.strip(), schema))
        return True

    def _read_text(self) -> Steps[bool]:
        """Read a text up to its end mark, piece by piece. One newline on each side is not its."""
        while not self._held:
            if not (yield from self._more()):
                return False
        self._held = self._held.removeprefix("\n")
        yield CallArguments('"')
        while True:
            text, mark, after = self._held.partition(CLOSE)
            if not mark:
                size = len(text) - partial_mark(CLOSE, text)
                text = self._held[:size]
                after = self._held[size:]
            self._held = after
            if text:
                yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if mark:
                yield CallArguments('"')
                return True
            if not (yield from self._more()):
                return False


def _as_json(text: str, schema: Any) -> str:
    """Return the JSON of a value that may be a text or something else."""
    quoted = json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return quoted
    types = _types(schema)
    kind = _JSON_TYPES.get(type(value), "string")
    is_number = kind == "integer" and "number" in types
    return quoted if "string" in types and kind not in types and not is_number else text
