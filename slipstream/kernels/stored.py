"""Stored weights as arrays of numpy, and their conversion to the types that a CPU computes in.

numpy has no bfloat16: its bits are uint16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.kernels.blocks import BlockMatrix

_PIECE_BYTES = 8 << 20  # of float32, in a conversion that has to make them
_SHOWN_NAMES = 6  # tensors that an error message names


class StoredArray(NamedTuple):
    """A tensor, usually of a mapped file."""

    code: str  # the type, as a safetensors code
    array: np.ndarray  # BF16 as its bits in uint16, 8-bit floats in uint8


Weight = StoredArray | BlockMatrix


def shape_of(weight: Weight) -> tuple[int, ...]:
    return weight.shape if isinstance(weight, BlockMatrix) else weight.array.shape


def bytes_of(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, BlockMatrix) else weight.array.nbytes


def to_float32(weight: Weight) -> np.ndarray:
    """Return a weight as float32: the same memory if it is that already."""
    if isinstance(weight, StoredArray) and weight.code == "F32":
        return weight.array
    out = np.empty(shape_of(weight), dtype=np.float32)
    start = 0
    for rows in _float_pieces(weight):
        out[start : start + len(rows)] = rows
        start += len(rows)
    return out


def to_bfloat16(weight: Weight) -> np.ndarray:
    """Return a weight as bits of bfloat16: the same memory if it is that already."""
    if isinstance(weight, StoredArray) and weight.code == "BF16":
        return weight.array
    out = np.empty(shape_of(weight), dtype=np.uint16)
    start = 0
    for rows in _float_pieces(weight):
        out[start : start + len(rows)] = round_to_bfloat16(rows)
        start += len(rows)
    return out


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16: the even one of two. A nan stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    missing = np.isnan(values)
    if missing.any():
        rounded[missing] = 0x7FC0
    return rounded


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float_pieces(weight: Weight) -> Iterator[np.ndarray]:
    """Yield float32 rows in order."""
    if isinstance(weight, BlockMatrix):
        yield from weight.expand(_PIECE_BYTES)
        return
    code, array = weight
    if code not in ("F32", "F16", "BF16"):
        raise ValueError(f"weights of type {code} have no values of their own")
    step = max(1, _PIECE_BYTES * len(array) // max(1, 4 * array.size))
    for start in range(0, len(array), step):
        rows = array[start : start + step]
        yield bfloat16_to_float32(rows) if code == "BF16" else rows.astype(np.float32, copy=False)


def check_all_taken(missing: Sequence[str], left: Iterable[str]) -> None:
    """Raise an error that lists the missing tensors and those that no layer has taken, if any."""
    problems = []
    if missing:
        problems.append(f"missing tensors: {_first_names(missing)}")
    if unknown := sorted(left):
        problems.append(f"unknown tensors: {_first_names(unknown)}")
    if problems:
        raise ValueError("; ".join(problems))


def _first_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return shown if rest <= 0 else f"{shown} and {rest} more"
