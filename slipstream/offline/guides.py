"""Guides of `slipstream.LLM`: what the whole completion must match, in several forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from slipstream.engine.constraints.guided import KINDS
from slipstream.engine.sampling_params import Guide


@runtime_checkable
class SchemaClass(Protocol):
    """A class with a JSON schema, such as a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]: ...


Schema = str | Mapping[str, Any] | type
GuideForm = str | Mapping[str, Any] | Sequence[str] | type
Parsed = TypeVar("Parsed")

# field of StructuredOutputsParams → kind of grammar
_KIND_OF_FIELD = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf_grammar",
    "json_object": "json",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The constraint of a completion, by vLLM's names. Exactly one field is given."""

    json: Schema | None = None  # a pydantic class, a schema, or a schema as JSON text
    regex: str | None = None  # a regular expression
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # a grammar in EBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # tags, each with a schema

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> tuple[str, Any]:
        """Return the kind of the grammar and its value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = [name for name, value in values.items() if value not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs need exactly one of {', '.join(values)}; "
                f"given: {', '.join(given) or 'none'}"
            )
        return _KIND_OF_FIELD[given[0]], values[given[0]]


def read_structured_outputs(given: StructuredOutputsParams | Mapping[str, Any]) -> Guide:
    """Return the guide of `structured_outputs`, which may be a dict of the same fields."""
    if isinstance(given, Mapping):
        known = {field.name for field in fields(StructuredOutputsParams)}
        unknown = [str(name) for name in given if name not in known]
        if unknown:
            raise TypeError(
                f"structured_outputs has no field {unknown[0]!r}; it has {', '.join(sorted(known))}"
            )
        given = StructuredOutputsParams(**given)
    kind, value = given.given()
    return Guide(kind, "" if kind == "json" else _text(value))


def read_guide(guide: GuideForm, kind: str) -> Guide | None:
    """Return the guide of `guide` and `guide_type`, whose kind may be left out. None: no guide."""
    if kind not in ("", *KINDS):
        raise ValueError(f"guide_type must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind:
        return Guide(kind, _text(guide))
    if isinstance(guide, str) and not guide:
        return None
    if isinstance(guide, Mapping | type) or (isinstance(guide, str) and _is_json_object(guide)):
        return Guide("json_schema", _text(guide))
    if not isinstance(guide, str) and all(isinstance(text, str) for text in guide):
        return Guide("choice", _text(guide))
    raise ValueError(
        f"guide_type must be one of {', '.join(KINDS)}: a guide without it is a pydantic class, a "
        "JSON schema or a list of texts"
    )


def _text(guide: GuideForm) -> str:
    """Return a grammar as text: a schema or a list as JSON."""
    if isinstance(guide, str):
        return guide
    if isinstance(guide, type):
        if not isinstance(guide, SchemaClass):
            raise TypeError(
                f"guide: the class {guide.__name__} has no model_json_schema(); give a pydantic "
                "class or a JSON schema"
            )
        return json.dumps(guide.model_json_schema())
    return json.dumps(guide)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def parse_text(text: str, model: type[Parsed] | None) -> Any:
    """Return the value of a JSON text, as an instance of a pydantic class if one is given."""
    if model is None:
        return json.loads(text)
    validate = getattr(model, "model_validate_json", None)
    if validate is None:
        raise TypeError(f"{model.__name__} has no model_validate_json(); give a pydantic class")
    return validate(text)
