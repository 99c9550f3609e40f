"""The inputs that a model's configuration declares, with their types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from slipstream.client.tensors import Array

_DTYPES = {
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_INT64": "int64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_STRING": "object",
}


@dataclass(frozen=True)
class DeclaredInput:
    name: str
    dtype: str  # numpy's name of the type; "object" for texts
    dims: tuple[int, ...]  # shape without the batch dimension; -1: any size
    optional: bool
    batched: bool  # whether a request has a batch dimension before `dims`

    @property
    def is_text(self) -> bool:
        return self.dtype == "object"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in a request of one row. A dimension of any size is 1."""
        dims = tuple(max(dim, 1) for dim in self.dims)
        return (1, *dims) if self.batched else dims

    def fill(self, value: Any) -> Array:
        """Return a tensor of the declared type and shape whose elements all have this value."""
        content = value.encode() if isinstance(value, str) else value
        return numpy.full(self.shape, content, dtype=self.dtype)


def declared_inputs(config: Mapping[str, Any]) -> dict[str, DeclaredInput]:
    """Return the inputs of a model's configuration by name. Raises ValueError for BF16."""
    batched = int(config.get("max_batch_size", 0)) > 0
    inputs = {}
    for tensor in config.get("input", []):
        name = tensor["name"]
        kind = tensor["data_type"]
        if kind not in _DTYPES:
            raise ValueError(
                f"the input {name} has the type {kind}, which cannot be sent from here"
            )
        dims = tuple(int(dim) for dim in tensor["dims"])
        inputs[name] = DeclaredInput(
            name, _DTYPES[kind], dims, bool(tensor.get("optional")), batched
        )
    return inputs
