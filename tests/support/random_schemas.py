"""Random JSON schemas that bound the length of every valid answer."""

from __future__ import annotations

import random
import string
from typing import Any


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    makers = [_integer, _string, _enumeration, _boolean, _pattern, _nothing]
    if depth < 3:
        makers += [_object, _array, _any_of] * (3 if depth == 0 else 1)
    return chance.choice(makers)(chance, depth)


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-500, 500)
    schema: dict[str, Any] = {
        "type": "integer",
        "minimum": low,
        "maximum": low + chance.randrange(1000),
    }
    if chance.random() < 0.2:
        schema = {
            "type": "integer",
            "exclusiveMinimum": low,
            "exclusiveMaximum": low + 2 + chance.randrange(9),
        }
    return schema


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + chance.randrange(8)}


def _enumeration(chance: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "grün", "", 'a "b" \\', 1, -2.5, 0.125, None, True, {"k": []}, ["x", 3]]
    chosen = chance.sample(values, chance.randrange(1, 5))
    return {"const": chosen[0]} if chance.random() < 0.2 else {"enum": chosen}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nothing(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["null", "boolean"]}


def _pattern(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.4:
        return {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4"])}
    return {
        "type": "string",
        "pattern": chance.choice([r"^[a-f0-9]{4}$", r"^(on|off)$", r"^\d{3}-[A-Z]{2}$"]),
    }


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    unusual = ["größe", "a b", "x-y", '"q"', "名前", "ключ", "smile 😀", "first_name", "home city"]
    names = chance.sample([*string.ascii_lowercase, *unusual], chance.randrange(1, 5))
    properties = {name: random_schema(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(3)
    if chance.random() < 0.25:
        items = [random_schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {
        "type": "array",
        "items": random_schema(chance, depth + 1),
        "minItems": low,
        "maxItems": low + chance.randrange(3),
    }


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]}
