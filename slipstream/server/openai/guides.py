"""The grammar that an answer must match, from the fields that give one.

These are OpenAI's `response_format`, vLLM's `structured_outputs`, and `guided_…`, its older form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.engine.sampling_params import Guide
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.fields import Fields, StructuredOutputs

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf_grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf_grammar",
}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# keys of each type of response_format besides the type
_FORMAT_KEYS = {
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "format"),
}


def read_guide(fields: Fields) -> tuple[str, Guide | None]:
    """Return the field that constrains the answer, and its grammar: ("", None) if there is none."""
    guides: dict[str, Guide] = {}
    for name, kind in _GUIDED.items():
        value = getattr(fields, name)
        if value is not None:
            guides[name] = Guide(kind, _text(value))
    if fields.structured_outputs is not None:
        guides |= _read_structured_outputs(fields.structured_outputs)
    if fields.response_format is not None:
        guide = _read_response_format(fields.response_format)
        if guide is not None:
            guides["response_format"] = guide
    if len(guides) > 1:
        first, *_, last = guides
        raise field_error(last, f"cannot be given together with {first}")
    return next(iter(guides.items()), ("", None))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_structured_outputs(given: StructuredOutputs) -> dict[str, Guide]:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            whole = f"structured_outputs.{name}"
            reason = "write it into the schema, or use a regex or grammar"
            raise ApiError(f"{whole} is not supported by this server: {reason}", whole)
    guides = {
        f"structured_outputs.{name}": Guide(kind, _text(getattr(given, name)))
        for name, kind in _STRUCTURED.items()
        if getattr(given, name) is not None
    }
    if given.json_object:
        guides["structured_outputs.json_object"] = Guide("json", "")
    if given.structural_tag is not None:
        name = "structured_outputs.structural_tag"
        tag = given.structural_tag
        guides[name] = _structural_tag(name, _parse(name, tag) if isinstance(tag, str) else tag)
    return guides


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise field_error(name, "must be JSON") from error
    if not isinstance(parsed, dict):
        raise field_error(name, "must be a JSON object")
    return parsed


def _read_response_format(given: Mapping[str, Any]) -> Guide | None:
    kind = given.get("type")
    if kind not in _FORMATS:
        expected = f"must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise field_error("response_format.type", f"{expected}, got {json.dumps(kind)[:40]}")
    for name in given:
        # A key that is ignored would look like a constraint that is enforced.
        if name != "type" and name not in _FORMAT_KEYS.get(kind, ()):
            raise field_error(f"response_format.{name[:40]}", f"does not go with type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json", "")
    if kind == "structural_tag":
        return _structural_tag("response_format", given)
    wrapped: Any = given.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        raise field_error(
            "response_format.json_schema.schema", "must be an object, the JSON schema"
        )
    assert isinstance(wrapped, dict)
    for key, type_, expected in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if not isinstance(wrapped.get(key), type_ | None):
            raise field_error(f"response_format.json_schema.{key}", f"must be {expected}")
    return Guide("json_schema", json.dumps(schema))


def _structural_tag(name: str, given: Mapping[str, Any]) -> Guide:
    """Return the grammar of free text with structures in it.

    `structures` and `triggers` say which; or `format`, of the type triggered_tags, says the same.
    """
    whole: Any = given
    if (tags := given.get("format")) is not None:
        whole = {
            "structures": list(_tag_structures(f"{name}.format", tags)),
            "triggers": tags.get("triggers"),
        }
        name = f"{name}.format"
    structures = whole.get("structures")
    if not isinstance(structures, list) or not structures:
        raise field_error(f"{name}.structures", "must be a list with at least one structure")
    for number, structure in enumerate(structures):
        place = f"{name}.structures[{number}]"
        ends = [structure.get(key) for key in ("begin", "end")] if _is_object(structure) else []
        if not ends or not all(isinstance(end, str) for end in ends):
            raise field_error(place, "must be an object with the texts begin and end, and a schema")
        if not _is_object(structure.get("schema")):
            raise field_error(f"{place}.schema", "must be an object, the JSON schema")
    triggers = whole.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(text, str) for text in triggers):
        raise field_error(f"{name}.triggers", "must be a list of texts that begin the structures")
    return Guide("structural_tag", json.dumps({"structures": structures, "triggers": triggers}))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _tag_structures(name: str, tags: Any) -> Iterator[dict[str, Any]]:
    """Yield the structures of a format of the type triggered_tags."""
    plain = (
        _is_object(tags)
        and tags.get("type") == "triggered_tags"
        and isinstance(tags.get("tags"), list)
        and not tags.get("at_least_one")
        and not tags.get("stop_after_first")
    )
    if not plain:
        raise field_error(
            name, "must have the type triggered_tags, without at_least_one and stop_after_first"
        )
    for number, tag in enumerate(tags["tags"]):
        content: Any = tag.get("content") if _is_object(tag) else None
        if not _is_object(content) or content.get("type") != "json_schema":
            raise field_error(f"{name}.tags[{number}].content.type", "must be json_schema")
        yield {
            "begin": tag.get("begin"),
            "schema": content.get("json_schema"),
            "end": tag.get("end"),
        }
