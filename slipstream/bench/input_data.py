"""Request data for any model, as perf_analyzer makes it: from a file, zeros, or random."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from slipstream.client.declared_inputs import DeclaredInput, declared_inputs
from slipstream.client.tensors import Array

_MAX_RANDOM = 2**15


class DataError(ValueError):
    """The data cannot be made into requests; the text says which tensor."""


def input_tensors(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[DeclaredInput]:
    """Return the inputs of a model's configuration. `shapes` override its dimensions."""
    declared = declared_inputs(config)
    unknown = shapes.keys() - declared.keys()
    if unknown:
        raise DataError(f"--shape {min(unknown)}: the model has no such input")
    return [
        replace(tensor, dims=shapes.get(tensor.name, tensor.dims)) for tensor in declared.values()
    ]


def read_rows(path: Path, tensors: Sequence[DeclaredInput]) -> list[dict[str, Array]]:
    """Read the rows of a JSON file, one row per request without batches.

    Its form is {"data": [{tensor: values, or {"content": values, "shape": dims}}, …]}.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [_row(row, tensors) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"--input-data {path}: {error}") from error


def _row(row: Mapping[str, Any], tensors: Sequence[DeclaredInput]) -> dict[str, Array]:
    known = {tensor.name for tensor in tensors}
    surplus = [name for name in row if name not in known and name != "model"]
    if surplus:
        raise DataError(f"the model has no input {surplus[0]}")
    missing = [tensor.name for tensor in tensors if not tensor.optional and tensor.name not in row]
    if missing:
        raise DataError(f"the input {missing[0]} is missing")
    return {
        tensor.name: _read_values(row[tensor.name], tensor)
        for tensor in tensors
        if tensor.name in row
    }


def _read_values(value: Any, tensor: DeclaredInput) -> Array:
    content = value
    shape = None
    if isinstance(value, Mapping):
        content = value["content"]
        shape = value.get("shape")
    flat = content if isinstance(content, list) else [content]
    items = [str(item).encode() for item in flat] if tensor.is_text else flat
    dims = tuple(shape) if shape is not None else tensor.dims
    if sum(dim < 0 for dim in dims) == 1 and len(dims) == 1:
        dims = (len(items),)
    return numpy.array(items, dtype=tensor.dtype).reshape(dims)


def generate_row(
    tensors: Sequence[DeclaredInput], random: bool, text: str | None, length: int
) -> dict[str, Array]:
    """Return zeros or random values for every required input.

    Texts are `text`, or `length` random letters.
    """
    generator = numpy.random.default_rng(0)
    row = {}
    for tensor in tensors:
        if tensor.optional:
            continue
        if any(dim < 0 for dim in tensor.dims):
            raise DataError(
                f"the input {tensor.name} has no fixed shape; give --shape {tensor.name}:N,…"
            )
        if tensor.is_text:
            letters = "".join(chr(97 + int(letter)) for letter in generator.integers(0, 26, length))
            content = letters if text is None else text
            row[tensor.name] = numpy.full(tensor.dims, content.encode(), dtype=object)
        elif random:
            row[tensor.name] = generator.integers(0, _MAX_RANDOM, tensor.dims).astype(tensor.dtype)
        else:
            row[tensor.name] = numpy.zeros(tensor.dims, dtype=tensor.dtype)
    return row


def batch_rows(rows: Sequence[Mapping[str, Array]], size: int) -> list[dict[str, Array]]:
    """Return the inputs of requests with `size` rows each, so that every row is used.

    With `size` 0 the rows have no batch dimension.
    """
    if size == 0:
        return [dict(row) for row in rows]
    found = []
    for start in range(0, len(rows), size):
        batch = [rows[(start + item) % len(rows)] for item in range(size)]
        found.append({name: _stack(name, batch) for name in batch[0]})
    return found


def _stack(name: str, batch: Sequence[Mapping[str, Array]]) -> Array:
    """Return the values of an input in all rows of a batch as one tensor."""
    if len({row[name].shape for row in batch}) != 1:
        raise DataError(f"the input {name} has several shapes in one batch; use -b 1")
    return numpy.stack([row[name] for row in batch])
