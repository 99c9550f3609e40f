"""Code that changes queries, keys and values before RoPE in some models: bounds, norms that RoPE's
own code does not have, and scales that depend on the position.
"""

from __future__ import annotations

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, I64, LANES, VF32, Value
from slipstream.kernels.cpu.operations import Heads
from slipstream.kernels.cpu.records import Context


def heads(module: Module) -> Function:
    one = _normalise(module)
    body = Body(module, Heads)
    f = body.f
    size = body["head_size"]
    queries = body["heads"] * size
    keys = body["kv_heads"] * size
    with body.units(body.rows()) as token:
        row = body["source"] + token * body["source_stride"]
        with f.when(body["clip"] > 0.0):
            _clip(body, row, queries + keys * 2)
        with f.when(body["q_weight"].differs(0)):
            f.call(one, body.record, row, queries, body["q_weight"], body["q_bias"])
            f.call(one, body.record, row + queries * 4, keys, body["k_weight"], body["k_bias"])
        with f.when(body["scales"].differs(0)):
            position = f.load(I64, body.step(Context.POSITIONS) + token * 8, 8)
            factor = v.splat(f, f.load(F32, body["scales"] + position * 4, 4))
            with f.range(0, queries, LANES) as i:
                f.store(f.load(VF32, row + i * 4) * factor, row + i * 4)
    return f


def _clip(body: Body, row: Value, size: Value) -> None:
    f = body.f
    high = v.splat(f, body["clip"])
    low = -high
    with f.range(0, size, LANES) as i:
        number = f.load(VF32, row + i * 4)
        number = f.select(number > high, high, number)
        f.store(f.select(number < low, low, number), row + i * 4)


def _normalise(module: Module) -> Function:
    """Return the function (record, row, size, weight, bias) that normalises all queries or all keys
    of a token, each head for itself or all together.
    """
    body = Body(module, Heads, "normalise_heads", 5)
    f = body.f
    body.record, row, size, weight, bias = f.parameters
    part = f.select(body["together"].differs(0), size, body["head_size"])
    with f.range(0, size, part) as first:
        _normalise_part(body, row + first * 4, part, weight + first * 4)
    with f.when(bias.differs(0)), f.range(0, size, LANES) as i:
        f.store(f.load(VF32, row + i * 4) + f.load(VF32, bias + i * 4), row + i * 4)
    return f


def _normalise_part(body: Body, row: Value, size: Value, weight: Value) -> None:
    f = body.f
    mean = f.variable(F32, 0.0)
    with f.when(body["layer"].differs(0)):
        total = f.variable(VF32, 0.0)
        with f.range(0, size, LANES) as i:
            total.add(f.load(VF32, row + i * 4))
        mean.set(v.horizontal_sum(f, total.get()) / size.to(F32))
    shift = v.splat(f, mean.get())
    squares = f.variable(VF32, 0.0)
    with f.range(0, size, LANES) as i:
        number = f.load(VF32, row + i * 4) - shift
        squares.set(v.fma(f, number, number, squares.get()))
    average = v.horizontal_sum(f, squares.get()) / size.to(F32)
    factor = v.splat(f, 1.0 / f.intrinsic(F32, "llvm.sqrt.f32", average + body["epsilon"]))
    with f.range(0, size, LANES) as i:
        number = (f.load(VF32, row + i * 4) - shift) * factor
        f.store(number * f.load(VF32, weight + i * 4), row + i * 4)
