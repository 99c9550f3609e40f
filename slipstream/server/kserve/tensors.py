"""Tensors as requests and answers carry them, and reading one from the JSON of a generate request.

Types are strict and the texts are Triton's: an integer input takes integers only (wrapped to its
width), FP32 takes any number, BYTES takes strings. Values are flat, in row-major order.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from slipstream.repository.config import TensorConfig
from slipstream.server.kserve.errors import Code, InferenceError

SIGNED_BITS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}
UNSIGNED_BITS = {"UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64}
FLOATS = ("FP32", "FP64")
BINARY_ONLY = ("FP16", "BF16")
_SINGLE = struct.Struct("<f")


@dataclass(slots=True)
class Tensor:
    name: str
    datatype: str  # as on the wire: INT32, BYTES, …
    shape: tuple[int, ...]
    # int, float, bool or, for BYTES, bytes; logits are a `memoryview`, which reads like a list
    data: list[Any]

    @property
    def first(self) -> Any:
        """The one value of a scalar input; arrays count by their first element, as upstream takes
        them.
        """
        return self.data[0] if self.data else None

    def text(self) -> str:
        return "" if not self.data else self.data[0].decode("utf-8", "replace")

    def texts(self) -> list[str]:
        return [item.decode("utf-8", "replace") for item in self.data]


def single(number: float) -> float:
    """The nearest FP32 value, which is what an FP32 tensor holds."""
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def tensor_from_json(config: TensorConfig, batched: bool, value: Any) -> Tensor:
    count = len(value) if _is_array(value) else 1
    data = read_values(config.name, config.datatype, value)
    shape = _shape(config, batched, count)
    if config.datatype != "BYTES" and len(data) != count:  # of BYTES, the model's own check tells
        raise unreadable("Shape does not match true shape of 'data' field")
    return Tensor(config.name, config.datatype, shape, data)


def _is_array(value: Any) -> bool:
    return type(value) is list  # Members, which is an object, is a subclass


def _flat(value: Any) -> list[Any]:
    if type(value) is not list:
        return [value]
    if list not in map(type, value):
        return value
    return [leaf for item in value for leaf in _flat(item)]  # the parser bounds the depth


def _shape(config: TensorConfig, batched: bool, count: int) -> tuple[int, ...]:
    """The innermost open dimension takes what the fixed ones leave; other open ones are 1."""
    dims = ((-1,) if batched else ()) + config.dims
    left = count
    for dim in dims:
        if dim > 0:
            if left % dim:
                text = f"input '{config.name}' takes a multiple of {prod(d for d in dims if d > 0)} values, got {count}"
                raise InferenceError(text)
            left //= dim
    shape: list[int] = []
    for dim in reversed(dims):
        shape.append(dim if dim > 0 else left)
        left = left if dim > 0 else 1
    return tuple(reversed(shape))


def unreadable(text: str) -> InferenceError:
    return InferenceError(f"Unable to parse 'data': {text}", Code.INTERNAL)


def read_values(name: str, datatype: str, value: Any) -> list[Any]:
    """The values of a JSON scalar or (nested) array, each checked against the datatype."""
    if datatype in BINARY_ONLY:
        raise InferenceError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if datatype == "BYTES":
        try:
            return [item.encode("utf-8", "surrogateescape") for item in _flat(value)]
        except AttributeError:
            text = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            raise InferenceError(text, Code.INTERNAL) from None
    if datatype == "BOOL":
        return [_boolean(item) for item in _flat(value)]
    if datatype in FLOATS:
        return [
            single(_double(item)) if datatype == "FP32" else _double(item) for item in _flat(value)
        ]
    if datatype in SIGNED_BITS:
        return [_signed(item, SIGNED_BITS[datatype]) for item in _flat(value)]
    if datatype in UNSIGNED_BITS:
        return [_unsigned(item, UNSIGNED_BITS[datatype]) for item in _flat(value)]
    raise InferenceError(f"invalid datatype for input {name}")


def _boolean(item: Any) -> bool:
    if not isinstance(item, bool):
        raise unreadable("attempt to access JSON non-boolean as boolean")
    return item


def _double(item: Any) -> float:
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        raise unreadable("attempt to access JSON non-number as double")
    try:
        return float(item)
    except OverflowError:
        return math.inf if item > 0 else -math.inf


def _signed(item: Any, bits: int) -> int:
    if type(item) is not int or not -(2**63) <= item < 2**63:
        raise unreadable("attempt to access JSON non-signed-integer as signed-integer")
    half = 1 << (bits - 1)
    return (item + half) % (2 * half) - half


def _unsigned(item: Any, bits: int) -> int:
    if type(item) is not int or not 0 <= item < 2**64:
        raise unreadable("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return item % (1 << bits)
