"""Code of experts: their choice by a router's logits, the rows that they take, and their sum.

A pair is a token and one of its experts. Pairs are sorted by expert, so that each expert reads its
weights once. The experts of a token are added in the order of their weights, whatever else runs.
"""

from __future__ import annotations

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.code.linear import Tiles, multiply_block, rows_of_tile
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, I64, LANES, VF32, Value
from slipstream.kernels.cpu.operations import Combine, ExpertLinear, Gather, Group, Route
from slipstream.kernels.cpu.records import Thread

_LOWEST = float("-inf")
_WORK_FIELDS = 3


def route(module: Module) -> Function:
    body = Body(module, Route)
    f = body.f
    per_token = body["per_token"]
    with body.units(body.rows()) as row:
        logits = body["logits"] + row * body["stride"]
        chosen = body["chosen"] + row * per_token * 8
        weights = body["weights"] + row * per_token * 4
        top, total = _softmax_parts(body, logits)
        with f.range(0, per_token) as place:
            best, expert = _take_best(body, logits)
            f.store(expert, chosen + place * 8, 8)
            f.store(best, weights + place * 4, 4)
        own = f.variable(F32, 0.0)
        with f.range(0, per_token) as place:
            number = f.load(F32, weights + place * 4, 4)
            shifted = f.select(body["sigmoid"].differs(0), -number, number - top)
            power = v.extract(f, v.exp(f, v.splat(f, shifted)))
            weight = f.select(body["sigmoid"].differs(0), 1.0 / (power + 1.0), power)
            own.add(weight)
            f.store(weight, weights + place * 4, 4)
        divisor = f.variable(F32, total)
        with f.when(body["normalised"].differs(0)):
            divisor.set(own.get())
        with f.when(body["sigmoid"].differs(0)):
            divisor.set(1.0)
        factor = body["scale"] / divisor.get()
        with f.range(0, per_token) as place:
            f.store(f.load(F32, weights + place * 4, 4) * factor, weights + place * 4, 4)
    return f


def _softmax_parts(body: Body, logits: Value) -> tuple[Value, Value]:
    """Return the largest logit and the sum of exp(logit - largest)."""
    f = body.f
    count = body["experts"]
    lowest = f.value(VF32, _LOWEST)
    best = f.variable(VF32, lowest)
    with f.range(0, count, LANES) as i:
        numbers = f.select(v.first_lanes(f, count - i), f.load(VF32, logits + i * 4), lowest)
        best.set(v.maximum(f, best.get(), numbers))
    top = v.horizontal_max(f, best.get())
    total = f.variable(VF32, 0.0)
    with f.range(0, count, LANES) as i:
        numbers = f.select(v.first_lanes(f, count - i), f.load(VF32, logits + i * 4), lowest)
        total.add(v.exp(f, numbers - v.splat(f, top)))
    return top, v.horizontal_sum(f, total.get())


def _take_best(body: Body, logits: Value) -> tuple[Value, Value]:
    """Return the largest logit and its expert, the first of equals, and take it out."""
    f = body.f
    best = f.variable(F32, _LOWEST)
    expert = f.variable(I64, 0)
    found = f.variable(I64, 0)
    with f.range(0, body["experts"]) as i:
        number = f.load(F32, logits + i * 4, 4)
        with f.when(number > best.get()):
            best.set(number)
            expert.set(i)
            found.set(1)
    with f.when(found.get().equals(0)):
        # All that are left are no numbers, or were taken: the step's result is no number either.
        best.set(float("nan"))
    f.store(f.value(F32, _LOWEST), logits + expert.get() * 4, 4)
    return best.get(), expert.get()


def group(module: Module) -> Function:
    body = Body(module, Group)
    f = body.f
    held = body["held"]
    counts = body["counts"]
    with body.units(f.value(I64, 1)):
        pairs = body.rows() * body["per_token"]
        with f.range(0, held) as expert:
            f.store(f.value(I64, 0), counts + expert * 8, 8)
        with f.range(0, pairs) as pair:
            expert = f.load(I64, body["chosen"] + pair * 8, 8) - body["first"]
            with f.when((expert >= 0) & (expert < held)):
                place = counts + expert * 8
                f.store(f.load(I64, place, 8) + 1, place, 8)
        _list_work(body)
        with f.range(0, pairs) as pair:
            expert = f.load(I64, body["chosen"] + pair * 8, 8) - body["first"]
            row = f.variable(I64, -1)
            with f.when((expert >= 0) & (expert < held)):
                place = counts + expert * 8  # where the next row of the expert is
                row.set(f.load(I64, place, 8))
                f.store(row.get() + 1, place, 8)
                f.store(pair, body["tokens"] + row.get() * 8, 8)
            f.store(row.get(), body["places"] + pair * 8, 8)
    return f


def _list_work(body: Body) -> None:
    """List the experts that have rows, and turn the counts into their first rows."""
    f = body.f
    counts = body["counts"]
    active = f.variable(I64, 0)
    begin = f.variable(I64, 0)
    with f.range(0, body["held"]) as expert:
        place = counts + expert * 8
        count = f.load(I64, place, 8)
        f.store(begin.get(), place, 8)
        with f.when(count > 0):
            entry = body["work"] + 8 + active.get() * (8 * _WORK_FIELDS)
            f.store(expert, entry, 8)
            f.store(begin.get(), entry + 8, 8)
            f.store(count, entry + 16, 8)
            active.add(1)
            begin.add(count)
    f.store(active.get(), body["work"], 8)


def gather(module: Module, write: Function) -> Function:
    body = Body(module, Gather)
    f = body.f
    per_token = body["per_token"]
    width = body["width"]
    pairs = body["tokens"]
    scratch = body.own(Thread.ROW)
    with body.units(body.rows() * per_token) as row:
        pair = f.variable(I64, row * per_token)
        with f.when(pairs.differs(0)):
            pair.set(f.load(I64, pairs + row * 8, 8))
        source = f.variable(I64, body["source"] + pair.get() // per_token * body["source_stride"])
        with f.when(body["weights"].differs(0)):
            factor = v.splat(f, f.load(F32, body["weights"] + pair.get() * 4, 4))
            with f.range(0, width, LANES) as i:
                f.store(f.load(VF32, source.get() + i * 4) * factor, scratch + i * 4)
            source.set(scratch)
        target = body["target"] + row * body["target_stride"]
        f.call(write, source.get(), target, body["format"], width)
    return f


def expert_linear(module: Module, tiles: Tiles) -> Function:
    body = Body(module, ExpertLinear)
    f = body.f
    blocks = body["blocks"]
    active = f.load(I64, body["work"], 8)
    with body.units(active * blocks) as unit:
        block = unit % blocks
        entry = body["work"] + 8 + unit // blocks * (8 * _WORK_FIELDS)
        expert = f.load(I64, entry, 8)
        begin = f.load(I64, entry + 8, 8)
        rows = f.load(I64, entry + 16, 8)
        own = body["table"] + expert * 24
        kind = f.load(I64, own + 8, 8)
        weights = f.load(I64, own, 8) + block * f.load(I64, own + 16, 8)
        x = body["x"] + begin * body["x_stride"]
        each = rows_of_tile(body, tiles, kind, rows)
        bias_block = expert * blocks + block
        multiply_block(body, tiles, kind, weights, x, begin, rows, each, block, bias_block)
    return f


def combine(module: Module) -> Function:
    body = Body(module, Combine)
    f = body.f
    width = body["width"]
    per_token = body["per_token"]
    scratch = body.own(Thread.ROW)
    with body.units(body.rows()) as row:
        _start_sum(body, row, scratch)
        with f.range(0, per_token) as place:
            pair = row * per_token + place
            own = f.load(I64, body["places"] + pair * 8, 8)
            with f.when(own >= 0):
                weight = f.variable(F32, 1.0)
                with f.when(body["weights"].differs(0)):
                    weight.set(f.load(F32, body["weights"] + pair * 4, 4))
                source = body["source"] + own * body["source_stride"]
                _add_row(f, source, v.splat(f, weight.get()), scratch, width)
        target = body["target"] + row * body["target_stride"]
        scale = v.splat(f, body["scale"])
        with f.range(0, width, LANES) as i:
            total = f.variable(VF32, f.load(VF32, scratch + i * 4) * scale)
            with f.when(body["adds"].differs(0)):
                total.add(f.load(VF32, target + i * 4))
            f.store(total.get(), target + i * 4)
    return f


def _start_sum(body: Body, row: Value, scratch: Value) -> None:
    """Begin a sum with the result of the expert that all tokens take, or with zeros."""
    f = body.f
    width = body["width"]
    with f.range(0, width, LANES) as i:
        f.store(v.zeros(f), scratch + i * 4)
    with f.when(body["shared"].differs(0)):
        weight = f.variable(F32, 1.0)
        logits = body["shared_logits"]
        with f.when(logits.differs(0)):
            logit = f.load(F32, logits + row * body["shared_logits_stride"], 4)
            weight.set(v.extract(f, v.sigmoid(f, v.splat(f, logit))))
        source = body["shared"] + row * body["shared_stride"]
        _add_row(f, source, v.splat(f, weight.get()), scratch, width)


def _add_row(f: Function, source: Value, weight: Value, scratch: Value, width: Value) -> None:
    with f.range(0, width, LANES) as i:
        place = scratch + i * 4
        f.store(v.fma(f, f.load(VF32, source + i * 4), weight, f.load(VF32, place)), place)
