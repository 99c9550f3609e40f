"""Wrong JSON documents: every key with a wrong value, missing, or given twice."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

# One value of each JSON type, and the numbers at the edges of the integer types.
WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    1.5,
    2**31,
    2**63,
    2**64,
    1e300,
    "",
    "x",
    "1",
    [],
    [1],
    ["x"],
    [[1]],
    [None],
    {},
    {"x": 1},
)
_SECOND = "\u2063"  # marks a name that is written a second time

Path = tuple[str | int, ...]


def paths(document: Any, prefix: Path = ()) -> Iterator[Path]:
    """Yield the place of each value in the document."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(document, dict):
        children = list(document.items())
    elif isinstance(document, list):
        children = list(enumerate(document))[:2]
    for key, value in children:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def _parent(document: Any, path: Path) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def replaced(document: Any, path: Path, value: Any) -> Any:
    changed = copy.deepcopy(document)
    _parent(changed, path)[path[-1]] = value
    return changed


def removed(document: Any, path: Path) -> Any:
    changed = copy.deepcopy(document)
    del _parent(changed, path)[path[-1]]
    return changed


def given_twice(document: Any, path: Path, value: Any) -> Any:
    """Return the document with a member once more. `write` removes the mark from its name."""
    changed = copy.deepcopy(document)
    _parent(changed, path)[f"{path[-1]}{_SECOND}"] = value
    return changed


def write(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).replace(_SECOND, "").encode()


def mutants(document: Any) -> Iterator[Any]:
    """Yield the document with one wrong value, one member missing, or one member twice."""
    for path in paths(document):
        for value in WRONG_VALUES:
            yield replaced(document, path, value)
        yield removed(document, path)
        if isinstance(path[-1], str):
            yield given_twice(document, path, None)
            yield given_twice(document, path, "x")


def nested(depth: int, kind: str) -> bytes:
    """Return JSON text of arrays (`[`) or objects (`{`), `depth` levels deep."""
    if kind == "[":
        return b"[" * depth + b"]" * depth
    return b'{"a":' * depth + b"1" + b"}" * depth
