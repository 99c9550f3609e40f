"""The documentation page of the request fields, docs/request-fields.md.

`python docs/generate.py` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.request_fields.field import (
    BEAM_SEARCH,
    DRAFT_MODEL,
    LARGEST_INT,
    LARGEST_UINT64,
    Field,
    Range,
    Words,
)
from slipstream.request_fields.table import FIELDS, GROUPS

_INTRODUCTION = """# Request fields

These are the fields of a generation request. The same fields are tensors on Triton's HTTP and gRPC
protocols, keys of OpenAI's routes, and options of `slipstream.LLM`; the names may differ (see
[Names](#names)). A value outside its bounds is an error that names the field.

A model takes the inputs that its `config.pbtxt` declares. Fields marked \\* may also be sent as
request parameters, to models that do not declare them.

`python docs/generate.py` writes this page from `slipstream/request_fields/`.
"""

_NAMES = """
## Names

The first column is the name on text models (`generate`, ensembles, BLS models). The engine model
has the same name if its column is empty. The last column is the default on OpenAI's routes, if it
differs.
"""

_CONFLICTS = f"""
## Combinations

`{BEAM_SEARCH}` above 1 (beam search) and `{DRAFT_MODEL}` (a draft model) cannot be combined with
some fields:
"""


def page() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for title, group in GROUPS.items():
        parts.append(f"\n## {title}\n\n{_group_table(group)}")
    parts.append(f"{_NAMES}\n{_names_table()}")
    parts.append(f"{_CONFLICTS}\n{_conflicts_table()}")
    return "".join(parts)


def _group_table(group: Sequence[Field]) -> str:
    if all(field.unsupported_reason for field in group):
        return _table(
            ["field", "reason"], [[f"`{field.name}`", field.unsupported_reason] for field in group]
        )
    rows = [
        [
            f"`{field.name}`" + (" \\*" if field.allowed_as_parameter else ""),
            field.datatype,
            field.note or _values(field),
            _default(field),
            field.help,
        ]
        for field in group
    ]
    return _table(["field", "type", "values", "default", "meaning"], rows)


def _names_table() -> str:
    rows = []
    for field in FIELDS.values():
        engine = [field.engine, *field.aliases] if field.engine or field.aliases else []
        if engine or field.openai or field.llm:
            differs = field.openai_default is not None
            rows.append(
                [
                    f"`{field.name}`",
                    _codes(engine),
                    _codes([field.openai]),
                    _codes([field.llm]),
                    _literal(field.openai_default) if differs else "",
                ]
            )
    return _table(["field", "engine model", "OpenAI", "`LLM`", "OpenAI default"], rows)


def _conflicts_table() -> str:
    rows = []
    for feature in (BEAM_SEARCH, DRAFT_MODEL):
        names = [field.name for field in FIELDS.values() if feature in field.conflicts]
        rows += [[f"`{feature}`", f"`{name}`"] for name in names]
    return _table(["field", "cannot be combined with"], rows)


def _values(field: Field) -> str:
    if field.datatype == "BOOL":
        return "true or false"
    if isinstance(field.bound, Words):
        if field.bound.count == 1:
            return f"{field.bound.bytes} bytes"
        return f"at most {field.bound.count} texts of {field.bound.bytes} bytes"
    return _range(field.bound) if field.bound is not None else ""


def _range(bound: Range) -> str:
    if bound.low is None and bound.high is None:
        return "any finite number"
    low = f"above {_literal(bound.low)}" if bound.above else f"at least {_literal(bound.low)}"
    if bound.high is None or bound.high == LARGEST_INT:
        return low
    if bound.above:
        return f"{low}, at most {_literal(bound.high)}"
    return f"{_literal(bound.low)} to {_literal(bound.high)}"


def _default(field: Field) -> str:
    if field.default_note or not field.copied_unchanged:
        return field.default_note
    return _literal(field.sampling_default)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value == LARGEST_UINT64:
        return "2⁶⁴ − 1"
    return f"{value:g}"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
