"""Tensors as raw bytes: little-endian numbers, and strings that each come after their length."""

from __future__ import annotations

import struct
from array import array
from typing import Any

from slipstream.server.kserve.tensors import Tensor

# BF16 has no Python type: its values stay the bit patterns they are on the wire.
STRUCT_CODES = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "H",
}
SIZES = {datatype: struct.calcsize(code) for datatype, code in STRUCT_CODES.items()}
DATATYPES = frozenset({*SIZES, "BYTES"})
_LENGTH = struct.Struct("<I")


class IncompleteString(ValueError):
    """A string's length goes beyond the data. `length` is what it said."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a string of {length} bytes is not all there")
        self.length = length


def unpack(datatype: str, raw: bytes) -> list[Any]:
    """The values of a tensor whose size has been checked (numbers); IncompleteString (BYTES)."""
    if datatype == "BYTES":
        return _split(raw)
    return list(struct.unpack(f"<{len(raw) // SIZES[datatype]}{STRUCT_CODES[datatype]}", raw))


def left_packed(datatype: str, raw: bytes) -> array[Any]:
    """The values as they came, for those who only pass them on: FP16 as bit patterns, too."""
    values = array({2: "H", 4: "I", 8: "Q"}.get(SIZES[datatype], "B"))
    values.frombytes(raw)
    return values


def _split(raw: bytes) -> list[bytes]:
    items, position = [], 0
    while position < len(raw):
        start = position + _LENGTH.size
        length = int.from_bytes(raw[position:start], "little")
        position = start + length
        if position > len(raw):
            raise IncompleteString(length)
        items.append(raw[start:position])
    return items


def pack(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(item)) + item for item in tensor.data)
    if isinstance(tensor.data, (array, memoryview)):
        return tensor.data.tobytes()
    return struct.pack(f"<{len(tensor.data)}{STRUCT_CODES[tensor.datatype]}", *tensor.data)
