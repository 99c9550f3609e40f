"""Code of linear layers with quantised weights: levels of 4 or 8 bits, activations in 8 bits.

Four products of a weight's bytes and an activation's bytes are one instruction. A group's products
are an exact whole number; scale × that number is added to the output's total, group by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module, Variable
from slipstream.kernels.cpu.compiler.values import F32, I8, I32, VF32, VI32, Value
from slipstream.kernels.cpu.layout import GROUP
from slipstream.kernels.cpu.quantised_layouts import FACTOR_BYTES, LevelLayout

_HALVES = (0, 1)  # vectors of a block's outputs
_LOW_BITS = 0x0F0F0F0F
_BF16_ONES = 0x3F803F80  # two of bfloat16


class _Row(NamedTuple):
    """Where a row of Format.INT8 has what belongs to a group."""

    levels: Value
    scale: Value
    sums: list[Value]  # addresses of scale × sum, for each part
    corrections: list[Value]  # of -128 × sum


def integer_tile(module: Module, layout: LevelLayout, rows: int) -> Function:
    """Return the function (weights, x, x_stride, target, inputs) that computes [rows, 32]."""
    f = module.function(f"tile_{layout.format.name.lower()}_{rows}", 5)
    weights, x, x_stride, target, inputs = f.parameters
    groups = inputs // GROUP
    totals = f.accumulators(rows, len(_HALVES))
    with f.range(0, groups) as group:
        place = weights + group * layout.group_bytes + FACTOR_BYTES
        own = [
            _find_group(x + x_stride * row, inputs, groups, group, layout) for row in range(rows)
        ]
        scales = [v.splat(f, f.load(F32, row.scale, 4)) for row in own]
        for half in _HALVES:
            _add_group(f, layout, place, half, own, scales, [row[half] for row in totals])
    for half in _HALVES:
        factor = f.load(VF32, weights + half * 64, 64)
        for row, halves in enumerate(totals):
            f.store(halves[half].get() * factor, target + (row * 128 + half * 64))
    return f


def exact_tile(module: Module, layout: LevelLayout, rows: int) -> Function:
    """As `integer_tile`, for activations of bfloat16: levels are expanded in registers."""
    f = module.function(f"exact_{layout.format.name.lower()}_{rows}", 5)
    weights, x, x_stride, target, inputs = f.parameters
    totals = f.accumulators(rows, len(_HALVES))
    with f.range(0, inputs // GROUP) as group:
        place = weights + group * layout.group_bytes + FACTOR_BYTES
        own = [x + x_stride * row + group * (2 * GROUP) for row in range(rows)]
        sums = [_sum_parts(f, row, layout) if layout.has_offsets else [] for row in own]
        for half in _HALVES:
            _add_exact_group(f, layout, place, half, own, sums, [row[half] for row in totals])
    for half in _HALVES:
        factor = f.load(VF32, weights + half * 64, 64)
        for row, halves in enumerate(totals):
            f.store(halves[half].get() * factor, target + (row * 128 + half * 64))
    return f


def _sum_parts(f: Function, row: Value, layout: LevelLayout) -> list[Value]:
    """Return the sums of a group's activations that share a scale, each in all lanes."""
    ones = f.value(VI32, _BF16_ONES)
    found = []
    size = GROUP // layout.parts
    for first in range(0, GROUP, size):
        total = v.zeros(f)
        for element in range(first, first + size, 2):
            pair = v.splat(f, f.load(I32, row + element * 2, 4))
            total = v.dot_bf16(f, total, ones, pair)
        found.append(total)
    return found


def _add_exact_group(
    f: Function,
    layout: LevelLayout,
    place: Value,
    half: int,
    rows: Sequence[Value],
    sums: Sequence[Sequence[Value]],
    totals: Sequence[Variable],
) -> None:
    for part, vectors in enumerate(_level_vectors(f, layout, place, half)):
        at = part * 64 + half * 32
        scale = v.load_f16(f, place + at)
        pairs = [
            (element + 2 * second, _to_bf16_pairs(f, layout, levels, second))
            for element, levels in vectors
            for second in (0, 1)
        ]
        for row, own, total in zip(rows, sums, totals, strict=True):
            found = v.zeros(f)
            for element, weight in pairs:
                other = v.splat(f, f.load(I32, row + element * 2, 4))
                found = v.dot_bf16(f, found, weight, other)
            if layout.has_offsets:
                offset = v.load_f16(f, place + layout.offsets_start + at)
                total.set(v.fma(f, offset, own[part], total.get()))
            total.set(v.fma(f, scale, found, total.get()))


def _to_bf16_pairs(f: Function, layout: LevelLayout, levels: Value, second: int) -> Value:
    """Return bytes 0 and 1, or 2 and 3, of each lane as two bfloat16. Whole numbers of 8 bits are
    exact.
    """
    found = []
    for byte in (2 * second, 2 * second + 1):
        number = (levels >> (8 * byte)) & 0xFF
        if layout.bias:
            number = number - layout.bias
        found.append(number.to(VF32).bits(VI32))
    return (found[0] >> 16) | (found[1] & -65536)


def _find_group(x: Value, inputs: Value, groups: Value, group: Value, layout: LevelLayout) -> _Row:
    scale = x + inputs + group * 4
    sums = scale + groups * 4
    corrections = scale + groups * 8
    levels = x + group * GROUP
    if layout.parts == 1:
        return _Row(levels, scale, [sums], [corrections])
    half_sums = x + inputs + groups * 12 + group * 8
    half_corrections = half_sums + groups * 8
    return _Row(
        levels,
        scale,
        [half_sums, half_sums + 4],
        [half_corrections, half_corrections + 4],
    )


def _add_group(
    f: Function,
    layout: LevelLayout,
    place: Value,
    half: int,
    rows: Sequence[_Row],
    scales: Sequence[Value],
    totals: Sequence[Variable],
) -> None:
    """Add a group's products to the totals of 16 outputs, one for each row."""
    for part, vectors in enumerate(_level_vectors(f, layout, place, half)):
        at = part * 64 + half * 32
        scale = v.load_f16(f, place + at)
        offset = v.load_f16(f, place + layout.offsets_start + at) if layout.has_offsets else None
        for row, x_scale, total in zip(rows, scales, totals, strict=True):
            found = f.value(VI32, 0)
            if layout.bias:
                found = v.splat(f, f.load(I32, row.corrections[part], 4))
            for element, levels in vectors:
                other = v.splat(f, f.load(I32, row.levels + element, 4))
                found = v.dot_int8(f, found, levels, other, layout.bits == 4)
            if offset is not None:
                sums = v.splat(f, f.load(F32, row.sums[part], 4))
                total.set(v.fma(f, offset, sums, total.get()))
            total.set(v.fma(f, found.to(VF32), scale * x_scale, total.get()))


def _level_vectors(
    f: Function, layout: LevelLayout, place: Value, half: int
) -> list[list[tuple[int, Value]]]:
    """Return, for each scale of a group, (first input, bytes of four inputs of 16 outputs)."""
    start = layout.levels_start + half * layout.words * 64
    words = [f.load(VI32, place + start + 64 * word, 64) for word in range(layout.words)]
    if layout.bits == 8:
        found = [(4 * word, levels) for word, levels in enumerate(words)]
    else:
        low = [(4 * word, levels & _LOW_BITS) for word, levels in enumerate(words)]
        high = [(16 + 4 * word, (levels >> 4) & _LOW_BITS) for word, levels in enumerate(words)]
        found = low + high
    size = len(found) // layout.parts
    return [found[begin : begin + size] for begin in range(0, len(found), size)]


def read_row(module: Module, layout: LevelLayout) -> Function:
    """Return the function (block, output, size, target) that writes the weights of an output."""
    f = module.function(f"read_{layout.format.name.lower()}", 4)
    block, output, size, target = f.parameters
    factor = f.load(F32, block + output * 4, 4)
    half = output // 16
    lane = output % 16
    with f.range(0, size) as element:
        group = block + element // GROUP * layout.group_bytes + FACTOR_BYTES
        inside = element % GROUP
        part = inside // (GROUP // layout.parts)
        level = _read_level(f, layout, group, half, lane, inside)
        at = part * 64 + output * 2
        value = level * f.load("half", group + at, 2).to(F32)
        if layout.has_offsets:
            value = value + f.load("half", group + layout.offsets_start + at, 2).to(F32)
        f.store(value * factor, target + element * 4)
    return f


def _read_level(
    f: Function, layout: LevelLayout, group: Value, half: Value, lane: Value, inside: Value
) -> Value:
    within = inside if layout.bits == 8 else inside % 16
    place = group + layout.levels_start + half * (layout.words * 64)
    byte = f.load(I8, place + within // 4 * 64 + lane * 4 + within % 4).unsigned_to(I32)
    if layout.bits == 8:
        return (byte - 128).to(F32)
    return f.select(inside >= 16, byte >> 4, byte & 15).to(F32)
