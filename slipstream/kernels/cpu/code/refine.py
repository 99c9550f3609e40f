"""Code that computes the largest logits again, from weights that are not quantised.

Weights of few bits shift the best tokens' logits enough to let them trade places. Few tokens
matter, and reading their rows costs next to nothing.
"""

from __future__ import annotations

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, LANES, VF32, Value
from slipstream.kernels.cpu.operations import Refine, TableFormat
from slipstream.kernels.cpu.records import Context


def refine(module: Module) -> Function:
    kinds = (TableFormat.F32_ROWS, TableFormat.BF16_ROWS)
    dots = [(int(kind), _dot(module, kind)) for kind in kinds]
    body = Body(module, Refine)
    f = body.f
    vocabulary = body["vocabulary"]
    with body.units(body.rows()) as row:
        logits = body.step(Context.LOGIT_TARGET) + row * body["stride"]
        states = body["states"] + row * body["states_stride"]
        top = f.variable(VF32, float("-inf"))
        with f.range(0, vocabulary, LANES) as i:
            inside = v.first_lanes(f, vocabulary - i)
            found = f.select(inside, f.load(VF32, logits + i * 4), top.get())
            top.set(v.maximum(f, top.get(), found))
        least = v.horizontal_max(f, top.get()) - body["margin"]
        bound = v.splat(f, least)
        with f.range(0, vocabulary, LANES) as i:
            with f.when(v.any_lane(f, f.load(VF32, logits + i * 4) >= bound)):
                with f.range(i, f.least(vocabulary, i + LANES)) as token:
                    place = logits + token * 4
                    with f.when(f.load(F32, place, 4) >= least):
                        source = body["table"] + token * body["row_bytes"]
                        f.choose(body["table_format"], dots, source, states, body["size"], place)
                        _add_bias(body, token, place)
    return f


def _add_bias(body: Body, token: Value, place: Value) -> None:
    f = body.f
    with f.when(body["bias"].differs(0)):
        f.store(f.load(F32, place, 4) + f.load(F32, body["bias"] + token * 4, 4), place, 4)


def _dot(module: Module, kind: TableFormat) -> Function:
    """Return the function (row, state, size, target) that writes their dot product."""
    f = module.function(f"dot_{kind.name.lower()}", 4)
    row, state, size, target = f.parameters
    whole = size // LANES * LANES
    total = f.variable(VF32, 0.0)
    with f.range(0, whole, LANES) as i:
        if kind is TableFormat.F32_ROWS:
            weight = f.load(VF32, row + i * 4)
        else:
            weight = v.load_bf16(f, row + i * 2)
        total.set(v.fma(f, weight, f.load(VF32, state + i * 4), total.get()))
    result = f.variable(F32, v.horizontal_sum(f, total.get()))
    with f.range(whole, size) as i:
        if kind is TableFormat.F32_ROWS:
            single = f.load(F32, row + i * 4, 4)
        else:
            single = (f.load("i16", row + i * 2, 2).unsigned_to("i32") << 16).bits(F32)
        result.add(single * f.load(F32, state + i * 4, 4))
    f.store(result.get(), target, 4)
    return f
