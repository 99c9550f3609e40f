"""Code of the operations on rows: embeddings, norms, formats, the likeliest token."""

from __future__ import annotations

from slipstream.kernels.cpu.code.attention import Singles
from slipstream.kernels.cpu.code.body import Body
from slipstream.kernels.cpu.code.integers import read_row
from slipstream.kernels.cpu.compiler import vectors as v
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.values import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    Value,
    vector,
)
from slipstream.kernels.cpu.layout import BLOCK, GROUP, PART_FLOATS, SINGLE_PARTS
from slipstream.kernels.cpu.operations import (
    Copy,
    Embed,
    Format,
    Likeliest,
    Merge,
    Norm,
    Softcap,
    TableFormat,
)
from slipstream.kernels.cpu.quantised_layouts import LAYOUTS
from slipstream.kernels.cpu.records import Context, Thread

MINUS_INFINITY = float("-inf")


def write_row(module: Module) -> Function:
    """Return the function (source, target, format, width) that writes a float32 row."""
    f = module.function("write_row", 4)
    source, target, kind, width = f.parameters
    with f.when(kind.equals(int(Format.F32))) as branch:
        with f.range(0, width, LANES) as i:
            f.store(f.load(VF32, source + i * 4), target + i * 4)
    with branch.otherwise():
        with f.when(kind.equals(int(Format.BF16))) as narrow:
            with f.range(0, width, LANES) as i:
                v.store_bf16(f, f.load(VF32, source + i * 4), target + i * 2)
        with narrow.otherwise():
            _quantise(f, source, target, width)
    return f


def _quantise(f: Function, source: Value, target: Value, width: Value) -> None:
    """Write a row as Format.INT8."""
    groups = width // GROUP
    with f.range(0, groups) as group:
        parts = [f.load(VF32, source + group * (4 * GROUP) + 64 * half) for half in (0, 1)]
        top = v.horizontal_max(f, v.maximum(f, *(v.absolute(f, part) for part in parts)))
        scale = top / 127.0
        inverse = f.select(top > 0.0, 127.0 / top, top.like(0.0))
        factor = v.splat(f, inverse)
        rounded = [f.intrinsic(VF32, "llvm.rint.v16f32", part * factor).to(VI32) for part in parts]
        for half, numbers in enumerate(rounded):
            f.store(numbers.to(vector(I8)), target + group * GROUP + LANES * half)
        name = "llvm.vector.reduce.add.v16i32"
        sums = [f.intrinsic(I32, name, numbers) for numbers in rounded]
        total = sums[0] + sums[1]
        place = target + width + group * 4
        f.store(scale, place)
        f.store(scale * total.to(F32), place + groups * 4)
        f.store(total * -128, place + groups * 8)
        for half, part in enumerate(sums):
            place = target + width + groups * 12 + group * 8 + half * 4
            f.store(scale * part.to(F32), place)
            f.store(part * -128, place + groups * 8)


def _read_packed(module: Module, kind: TableFormat) -> Function:
    """Return the function (block, output, size, target) that writes the weights of an output."""
    f = module.function(f"read_{kind.name.lower()}", 4)
    block, output, size, target = f.parameters
    place = block + output * 4
    if kind is TableFormat.F32:
        with f.range(0, size) as i:
            f.store(f.load(F32, place + i * (4 * BLOCK), 4), target + i * 4)
        return f
    with f.range(0, (size + 1) // 2) as i:
        pair = f.load(I32, place + i * (4 * BLOCK), 4)
        f.store((pair << 16).bits(F32), target + i * 8)
        f.store((pair & -65536).bits(F32), target + i * 8 + 4)
    return f


def _read_by_row(module: Module, kind: TableFormat) -> Function:
    """Return the function (row, size, target)."""
    f = module.function(f"read_{kind.name.lower()}", 3)
    row, size, target = f.parameters
    with f.range(0, size) as i:
        if kind is TableFormat.F32_ROWS:
            value = f.load(F32, row + i * 4, 4)
        else:
            value = (f.load(I16, row + i * 2, 2).unsigned_to(I32) << 16).bits(F32)
        f.store(value, target + i * 4)
    return f


def embed(module: Module) -> Function:
    plain = [TableFormat.F32, TableFormat.BF16]
    packed = [(int(kind), _read_packed(module, kind)) for kind in plain]
    packed += [(int(layout.format), read_row(module, layout)) for layout in LAYOUTS]
    rows = [TableFormat.F32_ROWS, TableFormat.BF16_ROWS]
    by_row = [(int(kind), _read_by_row(module, kind)) for kind in rows]
    body = Body(module, Embed)
    f = body.f
    size = body["size"]
    kind = body["table_format"]
    with body.units(body.rows()) as row:
        target = body["target"] + row * body["target_stride"]
        token = f.load(I64, body.step(Context.TOKEN_IDS) + row * 8, 8)
        block = body["table"] + token // BLOCK * body["block_bytes"]
        f.choose(kind, packed, block, token % BLOCK, size, target)
        f.choose(kind, by_row, body["table"] + token * body["block_bytes"], size, target)
        given = f.select(body["takes_given"].differs(0), body.step(Context.EMBEDDINGS), 0)
        with f.when(given.differs(0)):
            source = f.load(I64, given + row * 8, 8)
            with f.when(source.differs(0)):
                with f.range(0, size) as i:
                    f.store(f.load(F32, source + i * 4, 4), target + i * 4)
        scale = v.splat(f, body["scale"])
        with f.range(0, size, LANES) as i:
            f.store(f.load(VF32, target + i * 4) * scale, target + i * 4)
        with f.when(body["positions"].differs(0)):
            position = f.load(I64, body.step(Context.POSITIONS) + row * 8, 8)
            learned = body["positions"] + position * size * 4
            with f.range(0, size) as i:
                added = f.load(F32, target + i * 4, 4) + f.load(F32, learned + i * 4, 4)
                f.store(added, target + i * 4)
    return f


def norm(module: Module, write: Function) -> Function:
    body = Body(module, Norm)
    f = body.f
    size = body["size"]
    width = body["width"]
    scratch = body.own(Thread.ROW)
    with body.units(body.rows()) as row:
        source = body["source"] + body.source_row(row) * body["source_stride"]
        target = body.own_buffer("target", "target_own") + row * body["target_stride"]
        mean, squares = _moments(body, source)
        spread = f.intrinsic(F32, "llvm.sqrt.f32", squares / size.to(F32) + body["epsilon"])
        factor = v.splat(f, 1.0 / spread)
        shift = v.splat(f, mean)
        bias = body["bias"]
        with f.range(0, width, LANES) as i:
            value = (f.load(VF32, source + i * 4) - shift) * factor
            f.store(value * f.load(VF32, body["weight"] + i * 4), scratch + i * 4)
        with f.when(bias.differs(0)):
            with f.range(0, width, LANES) as i:
                added = f.load(VF32, scratch + i * 4) + f.load(VF32, bias + i * 4)
                f.store(added, scratch + i * 4)
        with f.when(body["adds"].differs(0)) as branch:
            with f.range(0, width, LANES) as i:
                f.store(
                    f.load(VF32, target + i * 4) + f.load(VF32, scratch + i * 4), target + i * 4
                )
        with branch.otherwise():
            f.call(write, scratch, target, body["format"], width)
    return f


def _moments(body: Body, source: Value) -> tuple[Value, Value]:
    """Return the mean of a row, 0 for an RMS norm, and the sum of squares around it."""
    f = body.f
    width = body["width"]
    mean = f.variable(F32, 0.0)
    with f.when(body["layer"].differs(0)):
        total = f.variable(VF32, 0.0)
        with f.range(0, width, LANES) as i:
            total.add(f.load(VF32, source + i * 4))
        mean.set(v.horizontal_sum(f, total.get()) / body["size"].to(F32))
    middle = mean.get()
    shift = v.splat(f, middle)
    squares = f.variable(VF32, 0.0)
    with f.range(0, width, LANES) as i:
        value = f.load(VF32, source + i * 4) - shift
        squares.set(v.fma(f, value, value, squares.get()))
    # the padding of a row is zero, but is not part of it
    padding = (width - body["size"]).to(F32)
    return middle, v.horizontal_sum(f, squares.get()) - padding * middle * middle


def copy(module: Module, write: Function) -> Function:
    body = Body(module, Copy)
    f = body.f
    with body.units(body.rows()) as row:
        source = body["source"] + body.source_row(row) * body["source_stride"]
        target = body.own_buffer("target", "target_own") + row * body["target_stride"]
        f.call(write, source, target, body["format"], body["width"])
    return f


def merge(module: Module, write: Function, singles: Singles) -> Function:
    body = Body(module, Merge)
    f = body.f
    heads = body["heads"]
    size = body["head_size"]
    part_bytes = (size + PART_FLOATS) * 4
    scratch = body.own(Thread.ROW)
    sinks = body["sink_logits"]
    chunks = body.step(Context.SPLIT)
    with body.units(body.rows()) as row:
        token = body.source_row(row)
        target = body.own_buffer("target", "target_own") + row * body["target_stride"]
        with f.when(chunks.differs(0)) as branch:
            with f.range(body["heads"] * size, body["width"], LANES) as i:
                f.store(v.zeros(f), scratch + i * 4)
            with f.range(0, heads) as head:
                first = body.step(Context.PARTS) + (token * chunks * heads + head) * part_bytes
                # threads may merge the same parts at the same time: each has a sum of its own
                own = body.own(Thread.ATTENTION) + SINGLE_PARTS
                with f.range(0, part_bytes, 64) as i:
                    f.store(f.load(VF32, first + i), own + i)
                with f.range(1, chunks) as chunk:
                    f.call(singles.join, own, first + chunk * heads * part_bytes, size)
                with f.when(sinks.differs(0)):
                    f.call(singles.add_sink, own, own + part_bytes, sinks + head * 4, size)
                f.call(singles.finish, own, scratch + head * size * 4, size)
            f.call(write, scratch, target, body["format"], body["width"])
        with branch.otherwise():
            source = body["source"] + token * body["source_stride"]
            f.call(write, source, target, body["format"], body["width"])
    return f


def softcap(module: Module) -> Function:
    body = Body(module, Softcap)
    f = body.f
    cap = v.splat(f, body["cap"])
    scale = v.splat(f, body["scale"])
    bounded = body["cap"] > 0.0
    base = f.variable(I64, body["source"])
    with f.when(base.get().equals(0)):
        base.set(body.step(Context.LOGIT_TARGET))
    with body.units(body.rows()) as row:
        place = base.get() + row * body["stride"]
        with f.range(0, body["width"], LANES) as i:
            number = f.variable(VF32, f.load(VF32, place + i * 4) * scale)
            with f.when(bounded):
                number.set(v.tanh(f, number.get() / cap) * cap)
            f.store(number.get(), place + i * 4)
    return f


def likeliest(module: Module) -> Function:
    body = Body(module, Likeliest)
    f = body.f
    parts = body["parts"]
    vocabulary = body["vocabulary"]
    lowest = f.value(VF32, MINUS_INFINITY)
    with body.units(body.rows() * parts) as unit:
        first = unit % parts * body["part"]
        last = f.least(first + body["part"], vocabulary)
        place = body.step(Context.LOGIT_TARGET) + unit // parts * body["stride"]
        best = f.variable(VF32, MINUS_INFINITY)
        tokens = f.variable(VI32, 0)
        wrong = f.variable(vector("i1"), 0)
        with f.range(first, last, LANES) as i:
            inside = v.first_lanes(f, last - i)
            # the row is padded to whole vectors
            logits = f.load(VF32, place + i * 4)
            wrong.set(wrong.get() | (logits.is_nan() & inside))
            logits = f.select(inside, logits, lowest)
            better = logits > best.get()
            best.set(f.select(better, logits, best.get()))
            numbers = v.splat(f, i.to(I32)) + v.lane_numbers(f)
            tokens.set(f.select(better, numbers, tokens.get()))
        top = v.horizontal_max(f, best.get())
        candidates = f.select(
            best.get().equals(v.splat(f, top)), tokens.get(), f.value(VI32, 2**31 - 1)
        )
        f.store(v.horizontal_least(f, candidates).to(I64), body["tokens"] + unit * 8)
        is_wrong = wrong.get().bits(I16).differs(0)
        f.store(f.select(is_wrong, top.like(float("nan")), top), body["logits"] + unit * 4)
    return f
