"""Lay out quantised weights for compiled code: see quantised_layouts.py.

A weight is scale × level + offset. Scales and offsets become float16, divided by a power of two of
their output so that they do not underflow. Those of GGUF blocks without a product of two scales
stay exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.cpu.layout import BLOCK, GROUP
from slipstream.kernels.cpu.memory import aligned, round_up
from slipstream.kernels.cpu.operations import WeightFormat
from slipstream.kernels.cpu.pack import Packed, interleave_halves
from slipstream.kernels.cpu.quantised_layouts import FACTOR_BYTES, LAYOUT_OF, LevelLayout

_LARGEST_SCALE = 1024.0  # of an output, after the division
_HALF_GROUP = GROUP // 2
_MAX_INT4_LEVELS = 16


class QuantisedRows(NamedTuple):
    """Rows of a quantised matrix."""

    levels: np.ndarray  # int8 [rows, columns]
    scales: np.ndarray  # float32 [rows, groups]
    offsets: np.ndarray | None  # float32 [rows, groups]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.levels.shape[1] // self.scales.shape[1])


def choose_format(rows: QuantisedRows) -> WeightFormat | None:
    """Return the packed format that holds these rows; None if there is none."""
    halves = rows.group == _HALF_GROUP
    if rows.levels.shape[1] % GROUP or (not halves and rows.group % GROUP):
        return None
    lowest = int(rows.levels.min())
    few = int(rows.levels.max()) - lowest < _MAX_INT4_LEVELS
    if few:
        return WeightFormat.INT4_HALVES if halves else WeightFormat.INT4
    if rows.offsets is None:
        return WeightFormat.INT8_HALVES if halves else WeightFormat.INT8
    return None if halves else WeightFormat.INT8_OFFSET


def pack_levels(rows: QuantisedRows, gated: bool = False) -> Packed | None:
    """Return packed weights; None if no format holds them."""
    kind = choose_format(rows)
    if kind is None:
        return None
    layout = LAYOUT_OF[kind]
    if rows.offsets is not None:
        rows = _without_idle_scales(rows)
    levels, scales, offsets = _expand_groups(rows, layout)
    if gated:
        levels = interleave_halves(levels)
        scales = interleave_halves(scales)
        offsets = None if offsets is None else interleave_halves(offsets)
    return _fill(layout, levels, scales, offsets)


def _without_idle_scales(rows: QuantisedRows) -> QuantisedRows:
    """Return the same weights with scale 0 in groups whose levels are equal. Their scale may be any
    number, such as 1, and would make the other scales of the output underflow.
    """
    assert rows.offsets is not None
    by_group = rows.levels.reshape(len(rows.levels), -1, rows.group)
    first = by_group[:, :, 0]
    idle = (by_group == first[:, :, None]).all(axis=2)
    if not idle.any():
        return rows
    offsets = np.where(idle, rows.offsets + first * rows.scales, rows.offsets)
    levels = np.where(idle[:, :, None], np.int8(0), by_group).reshape(rows.levels.shape)
    return QuantisedRows(levels, np.where(idle, np.float32(0), rows.scales), offsets)


def _expand_groups(
    rows: QuantisedRows, layout: LevelLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return levels without sign, scales and offsets of groups of the layout's size."""
    size = GROUP // layout.parts
    repeats = rows.group // size
    scales = np.repeat(rows.scales, repeats, axis=1)
    offsets = None if rows.offsets is None else np.repeat(rows.offsets, repeats, axis=1)
    if layout.bits == 8:
        return rows.levels.view(np.uint8) ^ np.uint8(0x80), scales, offsets
    lowest = min(int(rows.levels.min()), 0)
    levels = (rows.levels - np.int8(lowest)).view(np.uint8)
    shifted = scales * np.float32(lowest)
    return levels, scales, shifted if offsets is None else offsets + shifted


def _fill(
    layout: LevelLayout, levels: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None
) -> Packed:
    count, columns = levels.shape
    outputs = round_up(count, BLOCK)
    blocks = outputs // BLOCK
    groups = columns // GROUP
    block_bytes = FACTOR_BYTES + groups * layout.group_bytes
    data = aligned(blocks * block_bytes)
    by_block = data.reshape(blocks, block_bytes)
    factors = _factors(scales, offsets)
    by_block[:, :FACTOR_BYTES].view(np.float32)[...] = _pad(factors, outputs).reshape(blocks, BLOCK)
    target = by_block[:, FACTOR_BYTES:].reshape(blocks, groups, layout.group_bytes)
    numbers = [scales] if offsets is None else [scales, offsets]
    for index, values in enumerate(numbers):
        start = index * layout.offsets_start
        rounded = _pad(values / factors[:, None], outputs).astype(np.float16)
        by_group = rounded.reshape(blocks, BLOCK, groups, layout.parts).transpose(0, 2, 3, 1)
        place = target[:, :, start : start + layout.offsets_start]
        place.view(np.float16)[...] = by_group.reshape(blocks, groups, -1)
    words = _words(layout, _pad(levels, outputs))
    by_group = words.reshape(blocks, 2, BLOCK // 2, groups, layout.words).transpose(0, 3, 1, 4, 2)
    target[:, :, layout.levels_start :].view(np.uint32)[...] = by_group.reshape(blocks, groups, -1)
    return Packed(layout.format, data, outputs, columns)


def _words(layout: LevelLayout, levels: np.ndarray) -> np.ndarray:
    """Return the levels of each output in 32-bit words: [outputs, words]."""
    if layout.bits == 8:
        return np.ascontiguousarray(levels).view(np.uint32)
    pairs = levels.reshape(len(levels), -1, 2, _HALF_GROUP)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return np.ascontiguousarray(packed).view(np.uint32).reshape(len(levels), -1)


def _factors(scales: np.ndarray, offsets: np.ndarray | None) -> np.ndarray:
    """Return the power of two that each output is divided by; 1 if its scales need none."""
    largest = np.abs(scales).max(axis=1)
    if offsets is not None:
        largest = np.maximum(largest, np.abs(offsets).max(axis=1))
    safe = np.where(largest > 0, largest, 1.0)
    return np.exp2(np.ceil(np.log2(safe / _LARGEST_SCALE))).astype(np.float32)


def _pad(rows: np.ndarray, count: int) -> np.ndarray:
    if len(rows) == count:
        return rows
    return np.pad(rows, ((0, count - len(rows)), *((0, 0) for _ in rows.shape[1:])))
