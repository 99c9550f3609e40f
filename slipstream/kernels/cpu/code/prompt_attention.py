"""Code of attention for several tokens of a row: the queries of a tile are the lanes of vectors.

Keys and values of the cache are read as they are. A lane never mixes with another, so that a
token's result does not depend on the tile that it is in.
"""

from __future__ import annotations

from slipstream.kernels.cpu.code.attention import FORMATS, LOWEST, position_bias
from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import F32, I32, I64, LANES, VF32, VI16, VI32, Value
from slipstream.kernels.cpu.layout import (
    CHUNK,
    LANE_POSITIONS,
    LANE_ROW,
    LANE_SLOPES,
    LANE_SUMS,
    LANE_TOPS,
    OFFSETS,
    TILE_LANES,
    TILE_OUTPUTS,
    TILE_QUERIES,
    TILE_SCORES,
    TILE_VALUES,
    TILE_WEIGHTS,
)
from slipstream.kernels.cpu.operations import Attention, Format
from slipstream.kernels.cpu.records import Context, Thread

_VECTORS = TILE_LANES // LANES
_TOGETHER = 4  # keys or columns that are computed together


def lane_products(module: Module, kind: Format) -> Function:
    """Return the function (lanes, rows, steps, row_step, target, adds): for the four rows whose
    addresses are at `rows`, the products with the lanes, summed over `steps`.
    """
    f = module.function(f"lane_products_{kind.name.lower()}", 6)
    lanes, rows, steps, row_step, target, adds = f.parameters
    sources = [f.load(I64, rows + 8 * row, 8) for row in range(_TOGETHER)]
    totals = f.accumulators(len(sources), _VECTORS)
    with f.when(adds.differs(0)):
        for row, own in enumerate(totals):
            for part, total in enumerate(own):
                total.set(f.load(VF32, target + (row * LANE_ROW + part * 64)))
    with f.range(0, steps) as step:
        is_float = kind is Format.F32
        wanted = VF32 if is_float else VI32
        loaded = [f.load(wanted, lanes + step * LANE_ROW + part * 64) for part in range(_VECTORS)]
        for source, own in zip(sources, totals, strict=True):
            value = v.splat(f, f.load(F32 if is_float else I32, source + step * row_step, 4))
            for lane, total in zip(loaded, own, strict=True):
                if is_float:
                    total.set(v.fma(f, lane, value, total.get()))
                else:
                    total.set(v.dot_bf16(f, total.get(), lane, value))
    for row, own in enumerate(totals):
        for part, total in enumerate(own):
            f.store(total.get(), target + (row * LANE_ROW + part * 64))
    return f


def weigh_lanes(module: Module) -> Function:
    """Return the function (record, memory, first, count): turn the scores of a chunk into weights,
    and scale what the lanes have so far. `count` is a multiple of four.
    """
    body = Body(module, Attention, "weigh_lanes", 4)
    f = body.f
    body.record, memory, first, count = f.parameters
    biased = body["slopes"].differs(0)
    scale = v.splat(f, f.select(biased, body["scale"].like(1.0), body["scale"]))
    cap = body["softcap"]
    caps = v.splat(f, cap)
    window = v.splat(f, body["window"].to(I32))
    sinks = v.splat(f, body["sinks"].to(I32))
    is_bf16 = body["format"].equals(int(Format.BF16))
    lowest = f.value(VF32, float("-inf"))
    with f.range(0, LANE_ROW, 64) as part:
        own = f.load(VI32, memory + LANE_POSITIONS + part)
        with f.when(biased):
            _add_biases(body, memory, part, first, count, own)
        before, kept = _oldest(body, own, own - window, sinks)
        old_top = f.load(VF32, memory + LANE_TOPS + part)
        top = f.variable(VF32, old_top)
        with f.range(0, count) as key:
            place = memory + TILE_SCORES + key * LANE_ROW + part
            score = f.variable(VF32, f.load(VF32, place) * scale)
            with f.when(cap > 0.0):
                score.set(v.tanh(f, score.get() / caps) * caps)
            position = v.splat(f, (first + key).to(I32))
            seen = (position <= own) & ((position > before) | (position < kept))
            masked = f.select(seen, score.get(), lowest)
            f.store(masked, place)
            top.set(v.maximum(f, top.get(), masked))
        new_top = top.get()
        keep = v.exp(f, old_top - new_top)
        f.store(new_top, memory + LANE_TOPS + part)
        total = f.variable(VF32, f.load(VF32, memory + LANE_SUMS + part) * keep)
        with f.range(0, count, 2) as key:
            pair = []
            for offset in (0, 1):
                place = memory + TILE_SCORES + (key + offset) * LANE_ROW + part
                pair.append(v.exp(f, f.load(VF32, place) - new_top))
                total.add(pair[-1])
            _store_weights(f, is_bf16, pair, memory + TILE_WEIGHTS + part, key)
        f.store(total.get(), memory + LANE_SUMS + part)
        with f.range(0, body["head_size"]) as column:
            place = memory + TILE_OUTPUTS + column * LANE_ROW + part
            f.store(f.load(VF32, place) * keep, place)
    return f


def _oldest(body: Body, own: Value, before: Value, sinks: Value) -> tuple[Value, Value]:
    """Return the last position that queries do not attend to, and the end of those that they always
    attend to. before, sinks: the same without chunks
    """
    f = body.f
    last = f.variable(VI32, before)
    kept = f.variable(VI32, sinks)
    with f.when(body["chunk"].differs(0)):
        size = v.splat(f, body["chunk"].to(I32))
        begin = own // size * size
        last.set(f.select(begin > before, begin - 1, before))
        kept.set(f.select(begin < sinks, sinks, sinks.like(0)))
    return last.get(), kept.get()


def _add_biases(
    body: Body, memory: Value, part: Value, first: Value, count: Value, own: Value
) -> None:
    """Scale the scores of 16 lanes, and let them fall with the distance of their positions."""
    f = body.f
    scale = v.splat(f, body["scale"])
    slope = f.load(VF32, memory + LANE_SLOPES + part)
    with f.range(0, count) as key:
        place = memory + TILE_SCORES + key * LANE_ROW + part
        bias = position_bias(body, slope, v.splat(f, (first + key).to(I32)), own)
        f.store(v.fma(f, f.load(VF32, place), scale, bias), place)


def _store_weights(f: Function, is_bf16: Value, pair: list[Value], base: Value, key: Value) -> None:
    """Store the weights of two keys: pairs of bfloat16, or float32 one after the other."""
    with f.when(is_bf16) as branch:
        low, high = (v.float_to_bf16(f, weight).unsigned_to(VI32) for weight in pair)
        f.store(low | (high << 16), base + key // 2 * LANE_ROW)
    with branch.otherwise():
        for offset, weight in enumerate(pair):
            f.store(weight, base + (key + offset) * LANE_ROW)


def gather_values(module: Module, kind: Format) -> Function:
    """Return the function (values, offsets, count, size, target): copy the values of a chunk, those
    of bfloat16 in pairs of positions.
    """
    f = module.function(f"gather_values_{kind.name.lower()}", 5)
    values, offsets, count, size, target = f.parameters
    if kind is Format.F32:
        with f.range(0, count) as i:
            place = values + f.load(I64, offsets + i * 8, 8)
            with f.range(0, size, LANES) as column:
                f.store(f.load(VF32, place + column * 4), target + (i * size + column) * 4)
        return f
    with f.range(0, count, 2) as i:
        first = values + f.load(I64, offsets + i * 8, 8)
        second = values + f.load(I64, offsets + i * 8 + 8, 8)
        with f.range(0, size, LANES) as column:
            low = f.load(VI16, first + column * 2).unsigned_to(VI32)
            high = f.load(VI16, second + column * 2).unsigned_to(VI32)
            f.store(low | (high << 16), target + (i // 2 * size + column) * 4)
    return f


def tiles(module: Module, find: Function) -> Function:
    """Return the function (record, context, thread, unit) of a tile and a KV head."""
    attend = _tile_chunk(module)
    start = _start_tile(module)
    finish = _finish_tile(module)
    body = Body(module, Attention, "attend_tile", 4)
    f = body.f
    body.record, body.context, body.thread, unit = f.parameters
    memory = body.own(Thread.ATTENTION)
    head = unit % body["kv_heads"]
    entry = body.step(Context.TILE_LIST) + unit // body["kv_heads"] * 32
    tokens = f.load(I64, entry + 8, 8)
    position = f.load(I64, entry + 16, 8)
    table = f.load(I64, entry + 24, 8)
    end = position + tokens
    width = f.select(body["format"].equals(int(Format.F32)), 4, 2)
    row_bytes = body["head_size"] * width
    oldest = position + 1 - body["window"]
    f.call(start, body.record, memory, entry, head)
    with f.range(0, end, CHUNK) as first:
        count = f.least(end - first, CHUNK)
        with f.when((first < body["sinks"]) | (first + count > oldest)):
            block_tokens = body.step(Context.BLOCK_TOKENS)
            f.call(find, table, block_tokens, first, count, row_bytes, memory + OFFSETS)
            f.call(attend, body.record, memory, head, first, (count + 3) // 4 * 4)
    f.call(finish, body.record, memory, entry, head)
    return f


def _tile_chunk(module: Module) -> Function:
    """Return the function (record, memory, KV head, first, count): add what the positions of a
    chunk contribute. `count` is a multiple of four; masked positions fill it up.
    """
    products = [(int(kind), lane_products(module, kind)) for kind in FORMATS]
    gathers = [(int(kind), gather_values(module, kind)) for kind in FORMATS]
    weigh = weigh_lanes(module)
    body = Body(module, Attention, "tile_chunk", 5)
    f = body.f
    body.record, memory, head, first, count = f.parameters
    size = body["head_size"]
    kind = body["format"]
    is_float = kind.equals(int(Format.F32))
    words = f.select(is_float, size, size // 2)
    rows = memory + OFFSETS
    keys = body["keys"] + head * body["head_stride"]
    values = body["values"] + head * body["head_stride"]
    f.choose(kind, gathers, values, rows, count, size, memory + TILE_VALUES)
    _to_addresses(f, rows, count, keys)
    with f.range(0, count, _TOGETHER) as key:
        target = memory + TILE_SCORES + key * LANE_ROW
        lanes = memory + TILE_QUERIES
        word_bytes = f.value(I64, 4)
        f.choose(kind, products, lanes, rows + key * 8, words, word_bytes, target, f.value(I64, 0))
    f.call(weigh, body.record, memory, first, count)
    steps = f.select(is_float, count, count // 2)
    with f.range(0, size, _TOGETHER) as column:
        for row in range(_TOGETHER):
            f.store(memory + TILE_VALUES + (column + row) * 4, rows + row * 8, 8)
        target = memory + TILE_OUTPUTS + column * LANE_ROW
        lanes = memory + TILE_WEIGHTS
        f.choose(kind, products, lanes, rows, steps, size * 4, target, f.value(I64, 1))
    return f


def _to_addresses(f: Function, rows: Value, count: Value, base: Value) -> None:
    """Turn offsets into addresses, in place."""
    with f.range(0, count) as i:
        place = rows + i * 8
        f.store(base + f.load(I64, place, 8), place, 8)


def _start_tile(module: Module) -> Function:
    """Return the function (record, memory, entry, KV head): lay out the queries by lanes."""
    body = Body(module, Attention, "start_tile", 4)
    f = body.f
    body.record, memory, entry, head = f.parameters
    size = body["head_size"]
    group = body["heads"] // body["kv_heads"]
    width = f.select(body["format"].equals(int(Format.F32)), 4, 2)
    words = size * width // 4
    token = f.load(I64, entry, 8)
    used = f.load(I64, entry + 8, 8) * group
    position = f.load(I64, entry + 16, 8)
    with f.range(0, TILE_LANES) as lane:
        inside = lane < used
        number = f.select(inside, lane, 0)
        own = position + number // group
        f.store(own.to(I32), memory + LANE_POSITIONS + lane * 4)
        row = body["queries"] + (token + number // group) * body["query_stride"]
        source = row + (head * group + number % group) * size * width
        with f.range(0, words) as word:
            f.store(
                f.load(I32, source + word * 4, 4),
                memory + TILE_QUERIES + word * LANE_ROW + lane * 4,
            )
    with f.range(0, LANE_ROW, 64) as part:
        f.store(f.value(VF32, LOWEST), memory + LANE_TOPS + part)
        f.store(v.zeros(f), memory + LANE_SUMS + part)
    _start_lanes(body, memory, head * group, used)
    with f.range(0, size * LANE_ROW, 64) as part:
        f.store(v.zeros(f), memory + TILE_OUTPUTS + part)
    return f


def _start_lanes(body: Body, memory: Value, first: Value, used: Value) -> None:
    """Write the slopes of the lanes, and begin their sums with the sink logits, if there are any.
    first: the first query head
    """
    f = body.f
    group = body["heads"] // body["kv_heads"]
    slopes = body["slopes"]
    with f.when(slopes.differs(0)), f.range(0, TILE_LANES) as lane:
        head = first + lane % group
        f.store(f.load(F32, slopes + head * 4, 4), memory + LANE_SLOPES + lane * 4)
    logits = body["sink_logits"]
    with f.when(logits.differs(0)), f.range(0, used) as lane:
        head = first + lane % group
        f.store(f.load(F32, logits + head * 4, 4), memory + LANE_TOPS + lane * 4)
        f.store(f.value(F32, 1.0), memory + LANE_SUMS + lane * 4)


def _finish_tile(module: Module) -> Function:
    """Return the function (record, memory, entry, KV head): write the results of the queries."""
    body = Body(module, Attention, "finish_tile", 4)
    f = body.f
    body.record, memory, entry, head = f.parameters
    size = body["head_size"]
    group = body["heads"] // body["kv_heads"]
    token = f.load(I64, entry, 8)
    used = f.load(I64, entry + 8, 8) * group
    with f.range(0, used) as lane:
        factor = 1.0 / f.load(F32, memory + LANE_SUMS + lane * 4, 4)
        row = body["target"] + (token + lane // group) * body["target_stride"]
        target = row + (head * group + lane % group) * size * 4
        with f.range(0, size) as column:
            value = f.load(F32, memory + TILE_OUTPUTS + column * LANE_ROW + lane * 4, 4)
            f.store(value * factor, target + column * 4)
    return f


def attention(module: Module, attend_single: Function, attend_tile: Function) -> Function:
    body = Body(module, Attention)
    f = body.f
    kv_heads = body["kv_heads"]
    split = f.most(body.step(Context.SPLIT), 1)
    tile_units = body.step(Context.TILES) * kv_heads
    single_units = body.step(Context.SINGLES) * kv_heads * split
    with body.units(tile_units + single_units) as unit:
        with f.when(unit < tile_units) as branch:
            f.call(attend_tile, body.record, body.context, body.thread, unit)
        with branch.otherwise():
            number = unit - tile_units
            f.call(attend_single, body.record, body.context, body.thread, number)
    return f
