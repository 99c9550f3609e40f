"""Code of linear layers: tiles of up to 12 rows and 32 outputs, and what happens to their results.

An output is one chain of additions in the order of the inputs, however many rows a tile has. So a
token's result does not depend on the other tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.code.integers import exact_tile, integer_tile
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module, Variable
from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.compiler.values import F32, I32, I64, LANES, VF32, VI32, Value
from slipstream.kernels.cpu.layout import BLOCK
from slipstream.kernels.cpu.operations import ACTIVATIONS, Epilogue, Format, Linear, WeightFormat
from slipstream.kernels.cpu.quantised_layouts import LAYOUT_OF
from slipstream.kernels.cpu.records import Context, Thread

_HALVES = (0, 1)  # vectors of a block's outputs
_EXACT = 256  # added to the number of a tile that takes activations of bfloat16
_INTEGER_ROWS = 4  # of a tile of quantised weights: more need registers that there are not


def most_rows(kind: WeightFormat, level: Level) -> int:
    """Return the rows of a tile whose accumulators fit the registers."""
    registers = level.registers * level.vector_bits // (LANES * 32)  # of 16 lanes
    if registers >= 32:
        return _INTEGER_ROWS if kind in LAYOUT_OF else 12
    # two hold weights, and two what they are multiplied by
    return max(1, (registers - 4) // 2)


def tile(module: Module, kind: WeightFormat, rows: int) -> Function:
    """Return the function (weights, x, x_stride, target, inputs) that computes [rows, 32]."""
    if kind in LAYOUT_OF:
        return integer_tile(module, LAYOUT_OF[kind], rows)
    f = module.function(f"tile_{kind.name.lower()}_{rows}", 5)
    _, _, _, target, _ = f.parameters
    totals = f.accumulators(rows, len(_HALVES))
    if kind is WeightFormat.F32:
        _float_inputs(f, totals)
    else:
        _bf16_inputs(f, totals)
    for row, halves in enumerate(totals):
        for half, total in enumerate(halves):
            f.store(total.get(), target + (row * 128 + half * 64))
    return f


def _float_inputs(f: Function, totals: Sequence[Sequence[Variable]]) -> None:
    weights, x, x_stride, _, inputs = f.parameters
    rows = [x + x_stride * row for row in range(len(totals))]
    with f.range(0, inputs) as i:
        place = weights + i * (4 * BLOCK)
        loaded = [f.load(VF32, place + 64 * half, 64) for half in _HALVES]
        for row, halves in zip(rows, totals, strict=True):
            value = v.splat(f, f.load(F32, row + i * 4, 4))
            for weight, total in zip(loaded, halves, strict=True):
                total.set(v.fma(f, weight, value, total.get()))


def _bf16_inputs(f: Function, totals: Sequence[Sequence[Variable]]) -> None:
    weights, x, x_stride, _, inputs = f.parameters
    rows = [x + x_stride * row for row in range(len(totals))]
    with f.range(0, inputs // 2) as pair:
        place = weights + pair * (4 * BLOCK)
        loaded = [f.load(VI32, place + 64 * half, 64) for half in _HALVES]
        for row, halves in zip(rows, totals, strict=True):
            value = v.splat(f, f.load(I32, row + pair * 4, 4))
            for weight, total in zip(loaded, halves, strict=True):
                total.set(v.dot_bf16(f, total.get(), weight, value))


class Tiles(NamedTuple):
    """The functions that linear layers call."""

    cases: list[tuple[int, Function]]
    most: dict[WeightFormat, int]  # rows of a tile
    finish: Function


def tiles(module: Module) -> Tiles:
    most = {kind: most_rows(kind, module.level) for kind in WeightFormat}
    cases = [
        (kind * 16 + rows, tile(module, kind, rows))
        for kind in WeightFormat
        for rows in range(1, most[kind] + 1)
    ]
    cases += [
        (_EXACT + kind * 16 + rows, exact_tile(module, layout, rows))
        for kind, layout in LAYOUT_OF.items()
        for rows in range(1, most[kind] + 1)
    ]
    return Tiles(cases, most, _epilogue(module))


def linear(module: Module, tiles: Tiles) -> Function:
    body = Body(module, Linear)
    f = body.f
    kind = body["weight_format"]
    rows = body.rows()
    each = rows_of_tile(body, tiles, kind, rows)
    x = body.own_buffer("x", "x_own")
    with body.units(f.select(rows > 0, body["blocks"], 0)) as block:
        weights = body["weights"] + block * body["block_bytes"]
        multiply_block(body, tiles, kind, weights, x, 0, rows, each, block, block)
    return f


def rows_of_tile(body: Body, tiles: Tiles, kind: Value, rows: Value) -> Value:
    """Return how many rows a tile has, if `rows` are divided evenly."""
    f = body.f
    limit = f.variable(I64, tiles.most[WeightFormat.F32])
    for other in WeightFormat:
        with f.when(kind.equals(int(other))):
            limit.set(tiles.most[other])
    parts = (rows + limit.get() - 1) // limit.get()
    return (rows + parts - 1) // f.most(parts, 1)


def multiply_block(
    body: Body,
    tiles: Tiles,
    kind: Value,
    weights: Value,
    x: Value,
    begin: Value | int,
    rows: Value,
    each: Value,
    block: Value,
    bias_block: Value,
) -> None:
    """Compute 32 outputs of `rows` rows of x. begin: the row of the target that is the first"""
    f = body.f
    x_stride = body["x_stride"]
    result = body.own(Thread.TILE)
    with f.range(0, rows, each) as first:
        count = f.least(each, rows - first)
        case = kind * 16 + count + body["exact"] * _EXACT
        place = x + first * x_stride
        f.choose(case, tiles.cases, weights, place, x_stride, result, body["inputs"])
        with f.range(0, count) as row:
            target = first + row + begin
            f.call(
                tiles.finish,
                body.record,
                body.context,
                block,
                bias_block,
                target,
                result + row * 128,
            )


def _epilogue(module: Module) -> Function:
    """Return the function (record, context, block, bias block, row, result) that stores the 32
    results of a row.
    """
    body = Body(module, Linear, "linear_epilogue", 6)
    f = body.f
    body.record, body.context, block, bias_block, row, result = f.parameters
    halves = [f.variable(VF32, f.load(VF32, result + 64 * half)) for half in _HALVES]
    bias = body["bias"]
    with f.when(bias.differs(0)):
        for half, value in enumerate(halves):
            value.add(f.load(VF32, bias + bias_block * (4 * BLOCK) + 64 * half))
    base = f.variable(I64, body["target"])
    with f.when(base.get().equals(0)):
        base.set(body.step(Context.LOGIT_TARGET))
    target = base.get() + row * body["target_stride"]
    epilogue = body["epilogue"]
    with f.when(epilogue.equals(int(Epilogue.STORE))):
        for half, value in enumerate(halves):
            f.store(value.get(), target + block * 128 + 64 * half)
    with f.when(epilogue.equals(int(Epilogue.ADD))):
        for half, value in enumerate(halves):
            place = target + block * 128 + 64 * half
            f.store(f.load(VF32, place) + value.get(), place)
    with f.when(epilogue.equals(int(Epilogue.ADD_SCALED))):
        scale = v.splat(f, body["scale"])
        for half, value in enumerate(halves):
            place = target + block * 128 + 64 * half
            f.store(f.load(VF32, place) + value.get() * scale, place)
    with f.when(epilogue.equals(int(Epilogue.GATE))):
        gated = _activated(body, halves[0].get()) * halves[1].get()
        _store_format(body, gated, target, block * LANES)
    with f.when(epilogue.equals(int(Epilogue.CLAMPED_GATE))):
        gated = _clamped(body, halves[0].get(), halves[1].get())
        _store_format(body, gated, target, block * LANES)
    with f.when(epilogue.equals(int(Epilogue.ACTIVATE))):
        for half, value in enumerate(halves):
            place = block * BLOCK + LANES * half
            _store_format(body, _activated(body, value.get()), target, place)
    with f.when(epilogue.equals(int(Epilogue.SPLIT))):
        f.store(halves[0].get(), target + block * 64)
        f.store(halves[1].get(), body["second"] + row * body["target_stride"] + block * 64)
    return f


def _clamped(body: Body, x: Value, y: Value) -> Value:
    f = body.f
    high = v.splat(f, body["limit"])
    low = -high
    x = f.select(x > high, high, x)
    y = f.select(y > high, high, y)
    y = f.select(y < low, low, y)
    return x * v.sigmoid(f, x * v.splat(f, body["scale"])) * (y + 1.0)


def _activated(body: Body, x: Value) -> Value:
    found = body.f.variable(VF32, 0.0)
    _activate_one_of(body, x, found, 0)
    return found.get()


def _activate_one_of(body: Body, x: Value, found: Variable, first: int) -> None:
    """Set `found` to the chosen one of the activation functions from `first` on."""
    f = body.f
    with f.when(body["activation"].equals(first)) as branch:
        found.set(v.activate(f, ACTIVATIONS[first], x))
    if first + 1 < len(ACTIVATIONS):
        with branch.otherwise():
            _activate_one_of(body, x, found, first + 1)


def _store_format(body: Body, value: Value, target: Value, element: Value) -> None:
    f = body.f
    with f.when(body["format"].equals(int(Format.F32))) as branch:
        f.store(value, target + element * 4)
    with branch.otherwise():
        v.store_bf16(f, value, target + element * 2)
