"""Code of attention over the paged cache for rows of one token.

Positions are cut at multiples of CHUNK. What a chunk contributes is merged in order, so that the
result does not depend on how chunks are divided among threads. The result of a chunk is a part: the
largest score, the sum of weights, and 16 floats later the weighted sum of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.kernels.cpu.code.body import Body, load_i32
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module, Variable
from slipstream.kernels.cpu.compiler.values import (
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    Value,
    vector,
)
from slipstream.kernels.cpu.layout import (
    CHUNK,
    OFFSETS,
    PART_FLOATS,
    SINGLE_PARTS,
    SINGLE_SCORES,
)
from slipstream.kernels.cpu.operations import Attention, Format
from slipstream.kernels.cpu.records import Context, Thread

LOWEST = -1e30  # score of a part without positions; -inf would make differences nan

_QUERIES = 4  # whose sums over values are computed together
_VECTORS = 4  # of a value
FORMATS = (Format.F32, Format.BF16)


def element_bytes(kind: Format) -> int:
    return 4 if kind is Format.F32 else 2


class Singles(NamedTuple):
    """Functions that tiles use, too."""

    find: Function  # offsets of positions
    join: Function
    finish: Function
    add_sink: Function
    attend: Function  # a unit of single tokens


def find_offsets(module: Module) -> Function:
    """Return the function (table, block_tokens, first, count, row_bytes, offsets).

    It writes where `count` positions from `first` on are; 16 more repeat the last one.
    """
    f = module.function("find_offsets", 6)
    table, block_tokens, first, count, row_bytes, offsets = f.parameters
    done = f.variable(I64, 0)
    block = f.variable(I64, first // block_tokens)
    within = f.variable(I64, first % block_tokens)
    with f.loop() as loop:
        begin = done.get()
        loop.leave_if(begin >= count)
        some = f.least(block_tokens - within.get(), count - begin)
        slot = load_i32(f, table + block.get() * 4) * block_tokens + within.get()
        with f.range(0, some) as i:
            f.store(slot * row_bytes + i * row_bytes, offsets + (begin + i) * 8, 8)
        done.add(some)
        block.add(1)
        within.set(0)
    last = f.load(I64, offsets + count * 8 - 8, 8)
    with f.range(0, LANES) as i:
        f.store(last, offsets + (count + i) * 8, 8)
    return f


def score_keys(module: Module, kind: Format) -> Function:
    """Return the function (query, keys, offsets, count, size, target): dot products with `count`
    keys, rounded up to 16.
    """
    f = module.function(f"score_keys_{kind.name.lower()}", 6)
    query, keys, offsets, count, size, target = f.parameters
    width = 64 // element_bytes(kind)  # elements of a vector
    with f.range(0, count, LANES) as i:
        rows = [keys + f.load(I64, offsets + (i + lane) * 8, 8) for lane in range(LANES)]
        totals = [f.variable(VF32, 0.0) for _ in range(LANES)]
        with f.range(0, size // width) as part:
            _add_products(f, kind, query + part * 64, [row + part * 64 for row in rows], totals)
        if kind is Format.BF16:
            with f.when((size % width).differs(0)):
                place = size // width * 64
                _add_products(f, kind, query + place, [row + place for row in rows], totals, True)
        f.store(v.lane_sums(f, [total.get() for total in totals]), target + i * 4)
    return f


def _add_products(
    f: Function,
    kind: Format,
    query: Value,
    rows: Sequence[Value],
    totals: Sequence[Variable],
    half: bool = False,
) -> None:
    """Add a vector of the products of each row; half: 16 elements of bfloat16."""

    def load(address: Value) -> Value:
        if kind is Format.F32:
            return f.load(VF32, address)
        if not half:
            return f.load(VI32, address)
        some = f.load(vector(I32, 8), address)
        return v.shuffle(f, some, some.like(0), range(16))

    other = load(query)
    for row, total in zip(rows, totals, strict=True):
        if kind is Format.F32:
            total.set(v.fma(f, load(row), other, total.get()))
        else:
            total.set(v.dot_bf16(f, total.get(), load(row), other))


def sum_values(module: Module, kind: Format, queries: int, vectors: int) -> Function:
    """Return the function (weights, values, offsets, count, target, target_stride): the weighted
    sums of 16 × `vectors` columns for some queries.
    """
    f = module.function(f"sum_values_{kind.name.lower()}_{queries}_{vectors}", 6)
    weights, values, offsets, count, target, target_stride = f.parameters
    totals = f.accumulators(queries, vectors)
    step = LANES * element_bytes(kind)
    with f.range(0, count) as i:
        place = values + f.load(I64, offsets + i * 8, 8)
        loaded = []
        for part in range(vectors):
            address = place + part * step
            loaded.append(f.load(VF32, address) if kind is Format.F32 else v.load_bf16(f, address))
        for query, own in enumerate(totals):
            weight = v.splat(f, f.load(F32, weights + (i * 4 + query * CHUNK * 4), 4))
            for value, total in zip(loaded, own, strict=True):
                total.set(v.fma(f, weight, value, total.get()))
    for query, own in enumerate(totals):
        for part, total in enumerate(own):
            f.store(total.get(), target + target_stride * query + part * 64)
    return f


def join(module: Module) -> Function:
    """Return the function (part, other, size) that adds the other part to the first."""
    f = module.function("join_parts", 3)
    part, other, size = f.parameters
    with f.when(f.load(F32, other + 4, 4) > 0.0):
        own_top = f.load(F32, part, 4)
        other_top = f.load(F32, other, 4)
        top = f.most(own_top, other_top)
        keep = v.exp(f, v.splat(f, own_top - top))
        take = v.exp(f, v.splat(f, other_top - top))
        f.store(top, part)
        own_sum = f.load(F32, part + 4, 4) * v.extract(f, keep)
        f.store(own_sum + f.load(F32, other + 4, 4) * v.extract(f, take), part + 4)
        with f.range(0, size, LANES) as i:
            place = part + i * 4 + 64
            added = f.load(VF32, other + i * 4 + 64) * take
            f.store(v.fma(f, f.load(VF32, place), keep, added), place)
    return f


def finish(module: Module) -> Function:
    """Return the function (part, target, size) that divides by the sum of weights."""
    f = module.function("finish_part", 3)
    part, target, size = f.parameters
    factor = v.splat(f, 1.0 / f.load(F32, part + 4, 4))
    with f.range(0, size, LANES) as i:
        f.store(f.load(VF32, part + i * 4 + 64) * factor, target + i * 4)
    return f


def weigh_scores(module: Module) -> Function:
    """Return the function (record, scores, first, count, length, head, part): turn the scores of a
    head into weights, in place, and write the head of the part.
    """
    body = Body(module, Attention, "weigh_scores", 7)
    f = body.f
    body.record, scores, first, count, length, head, part = f.parameters
    oldest = f.variable(I64, length - body["window"])
    sinks = f.variable(I64, body["sinks"])
    chunk = body["chunk"]
    with f.when(chunk.differs(0)):
        begin = (length - 1) // chunk * chunk
        oldest.set(f.most(oldest.get(), begin))
        sinks.set(f.select(begin < sinks.get(), sinks.get(), 0))
    bounds = [v.splat(f, number.to(I32)) for number in (length, oldest.get(), sinks.get())]
    factor = f.variable(F32, body["scale"])
    with f.when(body["slopes"].differs(0)):
        _add_biases(body, scores, first, count, length, head)
        factor.set(1.0)
    scale = v.splat(f, factor.get())
    cap = body["softcap"]
    caps = v.splat(f, cap)
    top = f.variable(VF32, LOWEST)
    lowest = f.value(VF32, float("-inf"))
    with f.range(0, count, LANES) as i:
        score = f.variable(VF32, f.load(VF32, scores + i * 4) * scale)
        with f.when(cap > 0.0):
            score.set(v.tanh(f, score.get() / caps) * caps)
        positions = v.splat(f, (first + i).to(I32)) + v.lane_numbers(f)
        seen = (positions < bounds[0]) & ((positions >= bounds[1]) | (positions < bounds[2]))
        masked = f.select(seen, score.get(), lowest)
        top.set(v.maximum(f, top.get(), masked))
        f.store(masked, scores + i * 4)
    largest = v.horizontal_max(f, top.get())
    shift = v.splat(f, largest)
    total = f.variable(VF32, 0.0)
    with f.range(0, count, LANES) as i:
        weight = v.exp(f, f.load(VF32, scores + i * 4) - shift)
        total.add(weight)
        f.store(weight, scores + i * 4)
    f.store(largest, part)
    f.store(v.horizontal_sum(f, total.get()), part + 4)
    return f


def _add_biases(
    body: Body, scores: Value, first: Value, count: Value, length: Value, head: Value
) -> None:
    """Scale scores, and let them fall with the distance of their positions, in place."""
    f = body.f
    scale = v.splat(f, body["scale"])
    slope = v.splat(f, f.load(F32, body["slopes"] + head * 4, 4))
    own = v.splat(f, (length - 1).to(I32))
    with f.range(0, count, LANES) as i:
        positions = v.splat(f, (first + i).to(I32)) + v.lane_numbers(f)
        bias = position_bias(body, slope, positions, own)
        place = scores + i * 4
        f.store(v.fma(f, f.load(VF32, place), scale, bias), place)


def position_bias(body: Body, slope: Value, positions: Value, own: Value) -> Value:
    """Return the biases of positions for queries at the positions `own`. What all scores of a query
    share has no effect, so that biases may be those of the distance or of the position.
    """
    f = body.f
    found = f.variable(VF32, 0.0)
    with f.when(body["slopes_rounded"].differs(0)) as branch:
        exact = slope * positions.to(VF32)
        found.set(v.bf16_to_float(f, v.float_to_bf16(f, exact)))
    with branch.otherwise():
        found.set(slope * (positions - own).to(VF32))
    return found.get() * v.splat(f, body["slope_scale"])


def add_sink(module: Module, joining: Function) -> Function:
    """Return the function (part, other, logit, size) that adds a logit without a value to a part.
    other: memory for a part; logit: its address
    """
    f = module.function("add_sink", 4)
    part, other, logit, size = f.parameters
    f.store(f.load(F32, logit, 4), other)
    f.store(f.value(F32, 1.0), other + 4)
    with f.range(0, size, LANES) as i:
        f.store(v.zeros(f), other + i * 4 + PART_FLOATS * 4)
    f.call(joining, part, other, size)
    return f


def singles(module: Module) -> Singles:
    """Return the functions for rows of one token."""
    find = find_offsets(module)
    joining = join(module)
    finishing = finish(module)
    sink = add_sink(module, joining)
    chunk = _attend_chunk(module, find)
    body = Body(module, Attention, "attend_single", 4)
    f = body.f
    body.record, body.context, body.thread, unit = f.parameters
    kv_heads = body["kv_heads"]
    group = body["heads"] // kv_heads
    size = body["head_size"]
    part_bytes = (size + PART_FLOATS) * 4
    split = body.step(Context.SPLIT)
    with f.when(split.differs(0)) as branch:
        number = unit % split
        head = unit // split % kv_heads
        entry = body.step(Context.SINGLE_LIST) + unit // split // kv_heads * 24
        token = f.load(I64, entry, 8)
        place = (token * split + number) * body["heads"] + head * group
        part = body.step(Context.PARTS) + place * part_bytes
        f.call(chunk, body.record, body.context, body.thread, entry, head, number, part)
    with branch.otherwise():
        head = unit % kv_heads
        entry = body.step(Context.SINGLE_LIST) + unit // kv_heads * 24
        part = body.own(Thread.ATTENTION) + SINGLE_PARTS
        other = part + group * part_bytes
        chunks = (f.load(I64, entry + 8, 8) + (CHUNK - 1)) // CHUNK
        f.call(chunk, body.record, body.context, body.thread, entry, head, 0, part)
        with f.range(1, chunks) as number:
            f.call(chunk, body.record, body.context, body.thread, entry, head, number, other)
            with f.range(0, group) as query:
                f.call(joining, part + query * part_bytes, other + query * part_bytes, size)
        logits = body["sink_logits"]
        with f.when(logits.differs(0)), f.range(0, group) as query:
            place = logits + (head * group + query) * 4
            f.call(sink, part + query * part_bytes, other, place, size)
        row = body["target"] + f.load(I64, entry, 8) * body["target_stride"]
        target = row + head * group * size * 4
        with f.range(0, group) as query:
            f.call(finishing, part + query * part_bytes, target + query * size * 4, size)
    return Singles(find, joining, finishing, sink, f)


def _attend_chunk(module: Module, find: Function) -> Function:
    """Return the function (record, context, thread, entry, KV head, chunk, part)."""
    scorers = [(int(kind), score_keys(module, kind)) for kind in FORMATS]
    weigh = weigh_scores(module)
    add_up = _sum_group(module)
    body = Body(module, Attention, "attend_chunk", 7)
    f = body.f
    body.record, body.context, body.thread, entry, head, chunk, part = f.parameters
    size = body["head_size"]
    group = body["heads"] // body["kv_heads"]
    kind = body["format"]
    width = f.select(kind.equals(int(Format.F32)), 4, 2)
    part_bytes = (size + PART_FLOATS) * 4
    memory = body.own(Thread.ATTENTION)
    offsets = memory + OFFSETS
    scores = memory + SINGLE_SCORES
    length = f.load(I64, entry + 8, 8)
    first = chunk * CHUNK
    count = f.least(length - first, CHUNK)
    seen = (first < body["sinks"]) | (first + count > length - body["window"])
    with f.when((count > 0) & seen) as branch:
        table = f.load(I64, entry + 16, 8)
        block_tokens = body.step(Context.BLOCK_TOKENS)
        f.call(find, table, block_tokens, first, count, size * width, offsets)
        keys = body["keys"] + head * body["head_stride"]
        values = body["values"] + head * body["head_stride"]
        row = body["queries"] + f.load(I64, entry, 8) * body["query_stride"]
        queries = row + head * group * size * width
        with f.range(0, group) as query:
            own = scores + query * (CHUNK * 4)
            place = queries + query * size * width
            f.choose(kind, scorers, place, keys, offsets, count, size, own)
            number = head * group + query
            target = part + query * part_bytes
            f.call(weigh, body.record, own, first, count, length, number, target)
        f.call(add_up, body.record, scores, values, offsets, count, part)
    with branch.otherwise():
        with f.range(0, group) as query:
            own = part + query * part_bytes
            f.store(f.value(F32, LOWEST), own)
            f.store(f.value(F32, 0.0), own + 4)
            with f.range(0, size, LANES) as i:
                f.store(v.zeros(f), own + i * 4 + 64)
    return f


def _sum_group(module: Module) -> Function:
    """Return the function (record, weights, values, offsets, count, part): the weighted sums of
    values for the queries of a KV head.
    """
    summers = [
        (kind * 64 + queries * 8 + vectors, sum_values(module, kind, queries, vectors))
        for kind in FORMATS
        for queries in range(1, _QUERIES + 1)
        for vectors in (1, _VECTORS)
    ]
    body = Body(module, Attention, "sum_group", 6)
    f = body.f
    body.record, weights, values, offsets, count, part = f.parameters
    size = body["head_size"]
    group = body["heads"] // body["kv_heads"]
    kind = body["format"]
    width = f.select(kind.equals(int(Format.F32)), 4, 2)
    part_bytes = (size + PART_FLOATS) * 4
    with f.range(0, group, _QUERIES) as query:
        some = f.least(group - query, _QUERIES)
        own = weights + query * (CHUNK * 4)
        target = part + query * part_bytes + PART_FLOATS * 4
        column = f.variable(I64, 0)
        with f.loop() as loop:
            begin = column.get()
            loop.leave_if(begin >= size)
            vectors = f.select(size - begin >= LANES * _VECTORS, _VECTORS, 1)
            case = kind * 64 + some * 8 + vectors
            source = values + begin * width
            goal = target + begin * 4
            f.choose(case, summers, own, source, offsets, count, goal, part_bytes)
            column.add(vectors * LANES)
    return f
