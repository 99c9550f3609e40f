"""Tensors of requests and responses, and reading one from the JSON of a request.

Numbers are a NumPy array, which views the bytes that a client sent where it can. BYTES values are
a list of `bytes`: NumPy could only hold them as an array of objects, which cannot view received
bytes either and which every reader and writer would convert back to a list.

The types in JSON are strict and the error texts are Triton's: an integer input takes integers only
(wrapped to its width), FP32 takes any number, BYTES takes strings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.repository.config import TensorConfig
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.long_json import LongArray, Piece

Array = npt.NDArray[Any]

# The little-endian NumPy type of each numeric datatype. NumPy has no BF16: its values are kept as
# the 16-bit patterns that travel on the wire.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
BINARY_ONLY = ("FP16", "BF16")
_SINGLE = struct.Struct("<f")
_LARGEST_SINGLE = float(np.finfo(np.float32).max)
# (smallest, largest) value by the number of each integer type
_INTEGER_LIMITS = {
    dtype.num: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for dtype in DTYPES.values()
    if dtype.kind in "iu"
}


@dataclass(slots=True, eq=False)
class Tensor:
    name: str
    datatype: str  # Triton's name: INT32, BYTES, …
    shape: tuple[int, ...]
    # the values in row-major order: a flat array of the type in DTYPES, or for BYTES a list
    data: Array | list[bytes]

    @classmethod
    def from_values(
        cls, name: str, datatype: str, shape: tuple[int, ...], values: Sequence[Any]
    ) -> Tensor:
        """Return a tensor of Python values: numbers, booleans or, for BYTES, bytes."""
        return cls(name, datatype, shape, values_to_data(datatype, values))

    @property
    def first(self) -> Any:
        """The first value as a Python object, None if there is none. Upstream reads scalars so."""
        if not len(self.data):
            return None
        return self.data[0] if isinstance(self.data, list) else self.data.item(0)

    def values(self) -> list[Any]:
        """Return the values as Python objects: int, float, bool or bytes."""
        return self.data if isinstance(self.data, list) else self.data.tolist()

    def array(self) -> Array:
        """Return the numbers of a tensor that is not BYTES."""
        if isinstance(self.data, list):
            raise InferenceError(f"tensor '{self.name}' holds BYTES where numbers are expected")
        return self.data

    def strings(self) -> list[bytes]:
        """Return the strings of a BYTES tensor."""
        if not isinstance(self.data, list):
            raise InferenceError(f"tensor '{self.name}' holds numbers where BYTES are expected")
        return self.data

    def text(self) -> str:
        """Return the first string of a BYTES tensor, "" if there is none."""
        strings = self.strings()
        return strings[0].decode("utf-8", "replace") if strings else ""

    def texts(self) -> list[str]:
        return [item.decode("utf-8", "replace") for item in self.strings()]


def count_values(tensors: Iterable[Tensor]) -> int:
    """Return the number of values of all tensors."""
    return sum([len(tensor.data) for tensor in tensors])


def values_to_data(datatype: str, values: Sequence[Any]) -> Array | list[bytes]:
    """Return Python values in the form that `Tensor.data` has for this datatype."""
    if datatype == "BYTES":
        return list(values)
    return np.array(values, DTYPES[datatype])


def single(number: float) -> float:
    """Return the nearest FP32 value, which is what an FP32 tensor holds."""
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def tensor_from_json(config: TensorConfig, batched: bool, value: Any) -> Tensor:
    """Return the tensor of one key of a `generate` request. Its shape follows from `config`."""
    count = 1
    if _is_array(value):
        count = len(value)
    elif isinstance(value, LongArray):
        count = value.count
    data = read_values(config.name, config.datatype, value)
    shape = _shape(config, batched, count)
    # for BYTES, the check of the model's inputs reports it
    if config.datatype != "BYTES" and len(data) != count:
        raise unreadable("Shape does not match true shape of 'data' field")
    return Tensor(config.name, config.datatype, shape, data)


def _is_array(value: Any) -> bool:
    return type(value) is list  # Members, which is an object, is a subclass


def _flat(value: Any) -> list[Any]:
    """Return the values of nested arrays. None of them is long."""
    if type(value) is not list:
        return [value]
    if list not in map(type, value):
        return value
    flat = []
    for item in value:  # the parser bounds the depth
        flat += _flat(item)
    return flat


def _shape(config: TensorConfig, batched: bool, count: int) -> tuple[int, ...]:
    """Return the shape of `count` values.

    The innermost open dimension takes what the fixed ones leave; other open ones are 1.
    """
    dims = ((-1,) if batched else ()) + config.dims
    fixed = prod(dim for dim in dims if dim > 0)
    if count % fixed:
        raise InferenceError(
            f"input '{config.name}' takes a multiple of {fixed} values, got {count}"
        )
    left = count // fixed
    shape: list[int] = []
    for dim in reversed(dims):
        if dim > 0:
            shape.append(dim)
        else:
            shape.append(left)
            left = 1
    return tuple(reversed(shape))


def unreadable(text: str) -> InferenceError:
    return InferenceError(f"Unable to parse 'data': {text}", Code.INTERNAL)


def read_values(name: str, datatype: str, value: Any) -> Array | list[bytes]:
    """Return the values of a JSON scalar or (nested) array, each checked against the datatype."""
    if datatype in BINARY_ONLY:
        raise InferenceError(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if datatype == "BYTES":
        return _read_strings([item for piece in _pieces(value) for item in piece])
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise InferenceError(f"invalid datatype for input {name}")
    if not _holds_long(value):
        return _READERS[dtype.kind](_flat(value), dtype)
    # in pieces, so that other threads run in between
    return np.concatenate([_read_piece(piece, dtype) for piece in _pieces(value)])


def _holds_long(value: Any) -> bool:
    """Return whether a value is a long array, or an array with one."""
    if type(value) is not list:
        return isinstance(value, LongArray)
    return any(map(_holds_long, value))


def _pieces(value: Any) -> Iterator[Piece]:
    """Yield the values of nested arrays. What was read is released."""
    if isinstance(value, LongArray):
        parts = value.pieces
        while parts:
            part = parts.pop(0)
            if isinstance(part, np.ndarray):
                yield part
            else:
                yield from _pieces(part)
    elif _holds_long(value):
        for item in value:
            yield from _pieces(item)
    else:
        yield _flat(value)


def _read_piece(piece: Piece, dtype: np.dtype[Any]) -> Array:
    if not isinstance(piece, np.ndarray):
        return _READERS[dtype.kind](piece, dtype)
    if dtype.kind == "f":
        return piece.astype(np.float64).astype(dtype)
    if dtype.kind == "b" or (dtype.kind == "u" and piece.min() < 0):
        return _READERS[dtype.kind](piece[piece.argmin() :][:1].tolist(), dtype)
    return piece.astype(dtype)


def _read_strings(values: list[Any]) -> list[bytes]:
    try:
        return [item.encode("utf-8", "surrogateescape") for item in values]
    except AttributeError:
        text = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
        raise InferenceError(text, Code.INTERNAL) from None


def _read_booleans(values: list[Any], dtype: np.dtype[Any]) -> Array:
    if not set(map(type, values)) <= {bool}:
        raise unreadable("attempt to access JSON non-boolean as boolean")
    return np.array(values, dtype)


def _read_floats(values: list[Any], dtype: np.dtype[Any]) -> Array:
    doubles = [_double(item) for item in values]
    if dtype.itemsize == 8 or max(map(abs, doubles), default=0.0) <= _LARGEST_SINGLE:
        return np.array(doubles, dtype)
    with np.errstate(over="ignore"):  # what FP32 cannot hold becomes an infinity
        return np.array(doubles, dtype)


def _double(item: Any) -> float:
    if type(item) is not float and type(item) is not int:
        raise unreadable("attempt to access JSON non-number as double")
    try:
        return float(item)
    except OverflowError:
        return math.inf if item > 0 else -math.inf


def _read_signed(values: list[Any], dtype: np.dtype[Any]) -> Array:
    array = _read_integers(values, dtype, DTYPES["INT64"])
    if array is None:
        raise unreadable("attempt to access JSON non-signed-integer as signed-integer")
    return array


def _read_unsigned(values: list[Any], dtype: np.dtype[Any]) -> Array:
    array = _read_integers(values, dtype, DTYPES["UINT64"])
    if array is None:
        raise unreadable("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return array


def _read_integers(values: list[Any], dtype: np.dtype[Any], widest: np.dtype[Any]) -> Array | None:
    """Return the integers, wrapped to the width of `dtype`; None where one is no such integer."""
    if not set(map(type, values)) <= {int}:
        return None
    lowest = min(values, default=0)
    highest = max(values, default=0)
    if _fits(lowest, highest, dtype):
        return np.array(values, dtype)
    if _fits(lowest, highest, widest):
        return np.array(values, widest).astype(dtype)
    return None


def _fits(lowest: int, highest: int, dtype: np.dtype[Any]) -> bool:
    smallest, largest = _INTEGER_LIMITS[dtype.num]
    return smallest <= lowest and highest <= largest


# by the kind of the NumPy type
_READERS = {"b": _read_booleans, "f": _read_floats, "i": _read_signed, "u": _read_unsigned}
