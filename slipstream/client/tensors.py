"""Conversion between the protocol's tensors and numpy arrays."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[Any]

_TYPES = {
    "BOOL": numpy.bool_,
    "UINT8": numpy.uint8,
    "UINT16": numpy.uint16,
    "UINT32": numpy.uint32,
    "UINT64": numpy.uint64,
    "INT8": numpy.int8,
    "INT16": numpy.int16,
    "INT32": numpy.int32,
    "INT64": numpy.int64,
    "FP16": numpy.float16,
    "FP32": numpy.float32,
    "FP64": numpy.float64,
}
_NAMES = {numpy.dtype(kind): name for name, kind in _TYPES.items()}


def datatype_of(array: Array) -> str:
    """Return the protocol's name of an array's type. An array of objects holds texts."""
    return "BYTES" if array.dtype == object else _NAMES[array.dtype]


def texts(*rows: list[str]) -> Array:
    """Return a [batch, n] tensor of texts."""
    encoded = [list(map(str.encode, row)) for row in rows]
    return numpy.array(encoded, dtype=object)


def scalar(value: bool | int | float) -> Array:
    """Return [[value]] in the type that the protocol uses for such a value."""
    if isinstance(value, bool):
        return numpy.array([[value]], dtype=numpy.bool_)
    if isinstance(value, int):
        return numpy.array([[value]], dtype=numpy.int32)
    return numpy.array([[value]], dtype=numpy.float32)


def text_list(array: Array) -> list[str]:
    """Return every text of a tensor."""
    return [bytes(_as_bytes(text)).decode(errors="replace") for text in array.reshape(-1)]


def first_text(array: Array) -> str:
    """Return the first text of a tensor, or an empty one."""
    return text_list(array.reshape(-1)[:1])[0] if array.size else ""


def to_bytes(array: Array) -> bytes:
    """Return the raw contents of a tensor. A text comes after its length."""
    if array.dtype == object:
        items = map(_as_bytes, array.reshape(-1))
        return b"".join(struct.pack("<I", len(item)) + item for item in items)
    return numpy.ascontiguousarray(array).tobytes()


def _as_bytes(item: str | bytes) -> bytes:
    return item.encode() if isinstance(item, str) else item


def from_bytes(datatype: str, shape: list[int], raw: bytes) -> Array:
    if datatype == "BYTES":
        found = list(_elements(raw))
        items = numpy.empty(len(found), dtype=object)
        items[:] = found
        return items.reshape(shape)
    return numpy.frombuffer(raw, dtype=_TYPES[datatype]).reshape(shape)


def _elements(raw: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        yield bytes(raw[position + 4 : position + 4 + length])
        position += 4 + length


def to_json(name: str, array: Array) -> dict[str, Any]:
    flat = array.reshape(-1)
    data = [_as_bytes(item).decode() for item in flat] if array.dtype == object else flat.tolist()
    return {"name": name, "shape": list(array.shape), "datatype": datatype_of(array), "data": data}


def from_json(tensor: Mapping[str, Any]) -> Array:
    datatype = tensor["datatype"]
    shape = tensor["shape"]
    if datatype == "BYTES":
        items = numpy.empty(len(tensor["data"]), dtype=object)
        items[:] = [item.encode() for item in tensor["data"]]
        return items.reshape(shape)
    return numpy.array(tensor["data"], dtype=_TYPES[datatype]).reshape(shape)
