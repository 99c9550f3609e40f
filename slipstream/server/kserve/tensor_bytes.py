"""Tensors as raw bytes: little-endian numbers, and strings with their lengths before them."""

from __future__ import annotations

import struct

import numpy as np

from slipstream.server.kserve.tensors import DTYPES, Array, Tensor

Buffer = bytes | memoryview

SIZES = {datatype: dtype.itemsize for datatype, dtype in DTYPES.items()}
DATATYPES = frozenset({*SIZES, "BYTES"})
_LENGTH = struct.Struct("<I")


class IncompleteString(ValueError):
    """A string goes beyond the data, or the data ends within the length before one.

    `complete` is the number of strings, with the incomplete one if its length is complete.
    `length` is that length, or None. `available` are the bytes that are there.
    """

    def __init__(self, complete: int, length: int | None, available: int) -> None:
        super().__init__("the last string is incomplete")
        self.complete = complete
        self.length = length
        self.available = available


def unpack(datatype: str, raw: Buffer) -> Array | list[bytes]:
    """Return the values: numbers as a view of `raw`, whose size fits the type; strings as copies.

    Raises IncompleteString for BYTES.
    """
    if datatype == "BYTES":
        return _split(raw)
    return np.frombuffer(raw, DTYPES[datatype])


def _split(raw: Buffer) -> list[bytes]:
    raw = bytes(raw)  # slices of bytes are cheaper than slices of a view, and no copy if it is one
    items: list[bytes] = []
    position = 0
    while position < len(raw):
        start = position + _LENGTH.size
        length = int.from_bytes(raw[position:start], "little")
        position = start + length
        if position > len(raw):
            if start > len(raw):
                raise IncompleteString(len(items), None, len(raw) - start + _LENGTH.size)
            raise IncompleteString(len(items) + 1, length, len(raw) - start)
        items.append(raw[start:position])
    return items


def pack(tensor: Tensor) -> bytes:
    """Return the raw bytes of a tensor."""
    if isinstance(tensor.data, list):
        return b"".join([_LENGTH.pack(len(item)) + item for item in tensor.data])
    return tensor.data.tobytes()


def as_buffer(tensor: Tensor) -> Buffer:
    """Return the raw bytes of a tensor; numbers without a copy, where they are contiguous."""
    if isinstance(tensor.data, list):
        return pack(tensor)
    return np.ascontiguousarray(tensor.data).view(np.uint8).data
