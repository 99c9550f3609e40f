"""Bodies that differ from a valid one in the value of one member, at any depth."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

WRONG: tuple[Any, ...] = (None, -(10**30), "x", "\ud800", [5], {"type": 5})


def wrong_bodies(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, body) for each value of the body and each wrong one in its place."""
    for path in _paths(body):
        for value in WRONG:
            changed = copy.deepcopy(body)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            yield f"{path} = {value!r}", changed


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    members: Any = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for key, inner in members:
        yield (*before, key)
        yield from _paths(inner, (*before, key))
