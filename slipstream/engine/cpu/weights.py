"""Reads an engine's stored weights for compiled code. Needs no torch.

A quantised matrix keeps its bits if compiled code has its format, in a run of bfloat16. In a run of
float32 it is expanded, because activations in 8 bits would round more than float32 promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from slipstream.engine.cpu.packed_file import PackedFile
from slipstream.kernels.blocks import BlockMatrix, BlockRows
from slipstream.kernels.cpu.layout import BLOCK
from slipstream.kernels.cpu.pack import Packed, pack
from slipstream.kernels.cpu.pack_levels import QuantisedRows, pack_levels
from slipstream.kernels.stored import (
    StoredArray,
    Weight,
    bfloat16_to_float32,
    check_all_taken,
    round_to_bfloat16,
    shape_of,
    to_bfloat16,
    to_float32,
)

_BF16 = "bfloat16"
_INT4_CENTRE = 8


class _Quantised(NamedTuple):
    """A matrix in a quantised format of engine folders."""

    code: str  # I8, U8 (two levels a byte) or F8_E4M3
    array: np.ndarray
    scales: np.ndarray  # float32 [rows], or [rows, groups, (scale, offset)] of U8


class StoredWeights:
    """The weights of an engine. Each is taken exactly once; `close` raises an error that lists the
    missing and the unused ones.
    """

    def __init__(
        self, weights: Mapping[str, Weight], dtype: str, packed: PackedFile | None = None
    ) -> None:
        """dtype: float32 or bfloat16; packed: the file that keeps packed matrices"""
        self._left = dict(weights)
        self._file = packed
        self._missing: list[str] = []
        self.dtype = dtype

    def has(self, name: str) -> bool:
        return name in self._left

    def floats(self, name: str, shape: tuple[int, ...], rounded: bool = False) -> np.ndarray:
        """Return a weight in float32. rounded: its values are those of the run's type"""
        weight = self._take(name, shape)
        if weight is None:
            return np.zeros(shape, dtype=np.float32)
        found = to_float32(weight)
        if rounded and self.dtype == _BF16:
            return bfloat16_to_float32(round_to_bfloat16(found))
        return found

    def rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a matrix in the run's type; bfloat16 as its bits. It is mapped if it has that
        type.
        """
        weight = self._take(name, shape)
        if weight is None:
            return np.zeros((1, 1), dtype=np.float32)
        return np.ascontiguousarray(self._in_type(weight))

    def is_in_blocks(self, name: str) -> bool:
        """Return whether `name`.weight is one matrix in blocks of a GGUF file."""
        weight = self._left.get(f"{name}.weight")
        return isinstance(weight, BlockMatrix) and len(weight.parts) == 1

    def matrix(
        self, name: str, outputs: int, inputs: int, gated: bool = False
    ) -> tuple[Packed, ...]:
        """Return the weight `name`.weight of a linear layer, packed, in parts that follow each
        other.
        """
        if self._file is None:
            return self._pack(name, (outputs, inputs), gated)
        found = self._file.find(name)
        if found is None:
            return self._file.add(name, self._pack(name, (outputs, inputs), gated))
        self._left.pop(f"{name}.scales", None)
        self._take(f"{name}.weight", None)
        return found

    def matrices(
        self, name: str, count: int, outputs: int, inputs: int, gated: bool = False
    ) -> tuple[Packed, ...]:
        """Return `count` matrices whose rows follow each other in `name`.weight, packed alike."""
        for kind in ("weight", "scales"):
            whole = self._left.get(f"{name}.{kind}")
            if whole is None or shape_of(whole)[0] != count * outputs:
                continue
            del self._left[f"{name}.{kind}"]
            for index in range(count):
                rows = _take_rows(whole, index * outputs, (index + 1) * outputs)
                self._left[f"{name}.{index}.{kind}"] = rows
        found = []
        for index in range(count):
            parts = self.matrix(f"{name}.{index}", outputs, inputs, gated)
            if len(parts) > 1:
                raise ValueError(f"{name}.weight: an expert has parts of several formats")
            found.append(parts[0])
        return tuple(found)

    def _pack(self, name: str, shape: tuple[int, int], gated: bool) -> tuple[Packed, ...]:
        scales = self._left.pop(f"{name}.scales", None)
        if scales is not None:
            return (self._quantised_matrix(name, to_float32(scales), shape, gated),)
        weight = self._take(f"{name}.weight", shape)
        if weight is None:
            return (pack(np.zeros((1, 1), dtype=np.float32)),)
        if isinstance(weight, BlockMatrix) and self.dtype == _BF16:
            parts = _pack_blocks(weight, gated)
            if parts is not None:
                return parts
        return (pack(self._in_type(weight), gated),)

    def _quantised_matrix(
        self, name: str, scales: np.ndarray, shape: tuple[int, int], gated: bool
    ) -> Packed:
        weight = self._left.pop(f"{name}.weight", None)
        if weight is None:
            self._missing.append(f"{name}.weight")
            return pack(np.zeros((1, 1), dtype=np.float32))
        rows: QuantisedRows | None = None
        if isinstance(weight, StoredArray):
            rows = _read_rows(_Quantised(weight.code, weight.array, scales), shape)
        if rows is None:
            raise ValueError(f"{name}.weight: {shape_of(weight)} is no form of {list(shape)}")
        if self.dtype == _BF16 and rows.levels.dtype == np.int8:
            packed = pack_levels(rows, gated)
            if packed is not None:
                return packed
        expanded = expand_rows(rows)
        return pack(round_to_bfloat16(expanded) if self.dtype == _BF16 else expanded, gated)

    def close(self) -> None:
        """Raise an error that lists the missing and the unused tensors, if there are any."""
        check_all_taken(self._missing, self._left)
        if self._file is not None:
            self._file.finish()

    def _in_type(self, weight: Weight) -> np.ndarray:
        return to_bfloat16(weight) if self.dtype == _BF16 else to_float32(weight)

    def _take(self, name: str, shape: tuple[int, ...] | None) -> Weight | None:
        """shape: None: it is not read"""
        weight = self._left.pop(name, None)
        if weight is None:
            self._missing.append(name)
        elif shape is not None and shape_of(weight) != shape:
            raise ValueError(f"{name}: shape {shape_of(weight)}, the model's config says {shape}")
        return weight


def _read_rows(weight: _Quantised, shape: tuple[int, int]) -> QuantisedRows | None:
    """Return the levels of a matrix; None if its shape does not fit."""
    outputs, inputs = shape
    code, array, scales = weight
    if code == "U8" and array.shape == (outputs, inputs // 2):
        levels = np.stack((array & 15, array >> 4), axis=-1).reshape(outputs, inputs)
        centred = levels.view(np.int8) - np.int8(_INT4_CENTRE)
        first = np.ascontiguousarray(scales[..., 0])
        return QuantisedRows(centred, first, np.ascontiguousarray(scales[..., 1]))
    if array.shape != shape:
        return None
    if code == "I8":
        return QuantisedRows(array, scales.reshape(-1, 1), None)
    if code == "F8_E4M3":
        return QuantisedRows(_read_e4m3(array), scales.reshape(-1, 1), None)
    return None


def _read_e4m3(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of 8-bit floats: a sign, 4 bits of exponent, 3 of mantissa."""
    codes = np.arange(256)
    exponent = (codes >> 3) & 15
    mantissa = codes & 7
    sizes = np.where(exponent > 0, 1 + mantissa / 8, mantissa / 4) * 2.0 ** (exponent - 7)
    table = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    table[[127, 255]] = np.nan
    found: np.ndarray = table[bits]
    return found


def expand_rows(rows: QuantisedRows) -> np.ndarray:
    """Return the weights that quantised rows stand for, float32 [rows, columns]."""
    by_group = rows.levels.reshape(len(rows.levels), -1, rows.group).astype(np.float32)
    by_group *= rows.scales[..., None]
    if rows.offsets is not None:
        by_group += rows.offsets[..., None]
    return by_group.reshape(len(by_group), -1)


def _take_rows(weight: Weight, first: int, last: int) -> Weight:
    if isinstance(weight, BlockMatrix):
        return weight.take([(first, last)])
    return weight._replace(array=weight.array[first:last])


def _pack_blocks(matrix: BlockMatrix, gated: bool) -> tuple[Packed, ...] | None:
    """Return a matrix in blocks, packed as it is; None if compiled code lacks one of its formats,
    or a part does not fill the outputs that are packed together.
    """
    if gated and len(matrix.parts) > 1:
        levels = _join(matrix.parts)
        packed = None if levels is None else pack_levels(levels, gated)
        return None if packed is None else (packed,)
    found = []
    for number, part in enumerate(matrix.parts):
        if len(part.raw) % BLOCK and number + 1 < len(matrix.parts):
            return None
        packed = pack_levels(_levels_of(part), gated)
        if packed is None:
            return None
        found.append(packed)
    return tuple(found)


def _levels_of(part: BlockRows) -> QuantisedRows:
    return QuantisedRows(*part.format.read_levels(part.raw))


def _join(parts: tuple[BlockRows, ...]) -> QuantisedRows | None:
    """Return the rows of all parts; None if their groups differ."""
    rows = [_levels_of(part) for part in parts]
    if len({(one.group, one.offsets is None) for one in rows}) > 1:
        return None
    offsets = [one.offsets for one in rows if one.offsets is not None]
    return QuantisedRows(
        np.concatenate([one.levels for one in rows]),
        np.concatenate([one.scales for one in rows]),
        np.concatenate(offsets) if offsets else None,
    )
