"""Code of RoPE: normalise and rotate queries and keys, write keys and values to the cache."""

from __future__ import annotations

from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, I64, LANES, VF32, Value
from slipstream.kernels.cpu.operations import Format, Rope
from slipstream.kernels.cpu.records import Context, Thread

# With fewer tokens than this the heads of a token are units of their own.
_DIVIDED_TOKENS = 4


def rope(module: Module, write: Function) -> Function:
    """write: see rows.py"""
    one = _one_head(module, write)
    body = Body(module, Rope)
    f = body.f
    tokens = body.rows()
    heads = body["heads"] + body["kv_heads"] * 2
    divided = tokens < _DIVIDED_TOKENS
    parts = f.select(divided, heads, 1)
    with body.units(tokens * parts) as unit:
        token = unit // parts
        first = unit % parts
        last = f.select(divided, first + 1, heads)
        with f.range(first, last) as head:
            f.call(one, body.record, body.context, body.thread, token, head)
    return f


def _one_head(module: Module, write: Function) -> Function:
    """Return the function (record, context, thread, token, head)."""
    body = Body(module, Rope, "rotate_head", 5)
    f = body.f
    body.record, body.context, body.thread, token, head = f.parameters
    size = body["head_size"]
    width = f.select(body["format"].equals(int(Format.F32)), 4, 2)
    heads = body["heads"]
    kv_heads = body["kv_heads"]
    source = body["source"] + token * body["source_stride"] + head * size * 4
    scratch = body.own(Thread.ROW)
    slot = f.load(I64, body.step(Context.SLOTS) + token * 8, 8) * size * width
    target = f.variable(I64, body["queries"] + token * body["query_stride"] + head * size * width)
    weight = f.variable(I64, body["q_norm"])
    with f.when(head >= heads):
        target.set(body["keys"] + (head - heads) * body["head_stride"] + slot)
        weight.set(body["k_norm"])
    with f.when(head >= heads + kv_heads) as branch:
        target.set(body["values"] + (head - heads - kv_heads) * body["head_stride"] + slot)
        f.call(write, source, target.get(), body["format"], size)
    with branch.otherwise():
        with f.range(0, size, LANES) as i:
            f.store(f.load(VF32, source + i * 4), scratch + i * 4)
        with f.when(weight.get().differs(0)):
            _normalise(body, scratch, weight.get())
        with f.when(body["cosine"].differs(0)):
            _rotate(body, scratch, token)
        f.call(write, scratch, target.get(), body["format"], size)
    return f


def _normalise(body: Body, row: Value, weight: Value) -> None:
    """Apply an RMS norm to a head, in place."""
    f = body.f
    size = body["head_size"]
    squares = f.variable(VF32, 0.0)
    with f.range(0, size, LANES) as i:
        value = f.load(VF32, row + i * 4)
        squares.set(v.fma(f, value, value, squares.get()))
    mean = v.horizontal_sum(f, squares.get()) / size.to(F32)
    factor = v.splat(f, 1.0 / f.intrinsic(F32, "llvm.sqrt.f32", mean + body["epsilon"]))
    with f.range(0, size, LANES) as i:
        value = f.load(VF32, row + i * 4) * factor
        f.store(value * f.load(VF32, weight + i * 4), row + i * 4)


def _rotate(body: Body, row: Value, token: Value) -> None:
    """Rotate the pairs of a head, in place."""
    f = body.f
    half = body["half"]
    position = f.load(I64, body.step(Context.POSITIONS) + token * 8, 8)
    with f.range(0, half, LANES) as i:
        mask = v.first_lanes(f, half - i)
        place = (position * half + i) * 4
        cosine = v.load_masked(f, body["cosine"] + place, mask)
        sine = v.load_masked(f, body["sine"] + place, mask)
        first = v.load_masked(f, row + i * 4, mask)
        second = v.load_masked(f, row + (half + i) * 4, mask)
        v.store_masked(f, first * cosine - second * sine, row + i * 4, mask)
        v.store_masked(f, second * cosine + first * sine, row + (half + i) * 4, mask)
