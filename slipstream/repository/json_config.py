"""Convert the JSON configuration of a load request to the tree of a parsed config.pbtxt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.repository.pbtxt import Field, Message, Scalar
from slipstream.repository.schema import ENUMS, INTEGER_RANGES, MESSAGES


def message_from_json(type_name: str, given: Mapping[str, Any]) -> Message:
    """Return the tree that a config.pbtxt with the same content is parsed into."""
    declared = MESSAGES.get(type_name, {})
    return Message(tuple(_fields(declared, given)), 0)


def _fields(declared: Mapping[str, str], given: Mapping[str, Any]) -> Iterator[Field]:
    for name, value in given.items():
        shape, _, element = declared.get(name, "string").rpartition(" ")
        if value is None:
            continue
        if shape == "map" and isinstance(value, Mapping):
            for key, entry in value.items():
                pair = (
                    Field("key", Scalar("string", str(key), 0), 0),
                    Field("value", _value(element, entry), 0),
                )
                yield Field(name, Message(pair, 0), 0)
        elif shape == "repeated" and isinstance(value, list):
            for item in value:
                yield Field(name, _value(element, item), 0)
        else:
            yield Field(name, _value(element, value), 0)


def _value(kind: str, value: Any) -> Scalar | Message:
    if isinstance(value, Mapping):
        return message_from_json(kind, value)
    if isinstance(value, bool):
        return Scalar("word", "true" if value else "false", 0)
    if isinstance(value, (int, float)):
        return Scalar("number", str(value), 0)
    if isinstance(value, str) and (kind in ENUMS or kind in INTEGER_RANGES):
        return Scalar("word", value, 0)  # protobuf's JSON writes enums and long integers as strings
    return Scalar("string", value if isinstance(value, str) else str(value), 0)
