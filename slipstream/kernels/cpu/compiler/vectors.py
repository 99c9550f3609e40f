"""Operations on vectors of 16 lanes: arithmetic, conversions, dot products, exp, tanh and erf."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.kernels.cpu.compiler.function import Function
from slipstream.kernels.cpu.compiler.values import (
    BF16,
    F16,
    I8,
    I16,
    I32,
    LANES,
    VF32,
    VI16,
    VI32,
    Value,
    vector,
)

_V32BF16 = vector(BF16, 32)
_V64I8 = vector(I8, 64)
_V8I32 = vector(I32, 8)


def splat(f: Function, value: Value, lanes: int = LANES) -> Value:
    """Return a vector that has the value in every lane."""
    kind = vector(value.kind, lanes)
    first = f.emit(kind, f"insertelement {kind} poison, {value.typed}, i64 0")
    order = f"<{lanes} x i32> zeroinitializer"
    return f.emit(kind, f"shufflevector {first.typed}, {kind} poison, {order}")


def zeros(f: Function) -> Value:
    return f.value(VF32, 0.0)


def shuffle(f: Function, left: Value, right: Value, order: Sequence[int]) -> Value:
    kind = vector(left.kind.partition(" x ")[2][:-1], len(order))
    listed = ", ".join(f"i32 {lane}" for lane in order)
    return f.emit(
        kind, f"shufflevector {left.typed}, {right.typed}, <{len(order)} x i32> <{listed}>"
    )


def lane_numbers(f: Function) -> Value:
    """Return 0, 1, 2, …"""
    return Value(f, VI32, "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">")


def fma(f: Function, left: Value, right: Value, total: Value) -> Value:
    return f.intrinsic(VF32, "llvm.fma.v16f32", left, right, total)


def maximum(f: Function, left: Value, right: Value) -> Value:
    """Return the larger number of each lane; not for NaN."""
    return f.select(left > right, left, right)


def absolute(f: Function, value: Value) -> Value:
    return f.intrinsic(VF32, "llvm.fabs.v16f32", value)


def extract(f: Function, value: Value, lane: int = 0) -> Value:
    kind = value.kind.partition(" x ")[2][:-1]
    return f.emit(kind, f"extractelement {value.typed}, i64 {lane}")


def _fold(f: Function, value: Value, half: int) -> Value:
    return shuffle(f, value, value, [(lane + half) % LANES for lane in range(LANES)])


def horizontal_sum(f: Function, value: Value) -> Value:
    """Return the sum of all lanes, added as a tree."""
    for half in (8, 4, 2, 1):
        value = value + _fold(f, value, half)
    return extract(f, value)


def horizontal_max(f: Function, value: Value) -> Value:
    for half in (8, 4, 2, 1):
        value = maximum(f, value, _fold(f, value, half))
    return extract(f, value)


def horizontal_least(f: Function, value: Value) -> Value:
    for half in (8, 4, 2, 1):
        other = _fold(f, value, half)
        value = f.select(value < other, value, other)
    return extract(f, value)


def any_lane(f: Function, condition: Value) -> Value:
    """Return whether the condition holds in a lane."""
    return condition.bits(I16).differs(0)


def lane_sums(f: Function, vectors: Sequence[Value]) -> Value:
    """Return the sums of 16 vectors, one in each lane."""
    even = range(0, 2 * LANES, 2)
    odd = range(1, 2 * LANES, 2)
    level = list(vectors)
    while len(level) > 1:
        level = [
            shuffle(f, left, right, even) + shuffle(f, left, right, odd)
            for left, right in zip(level[::2], level[1::2], strict=True)
        ]
    return level[0]


def load_masked(f: Function, address: Value, mask: Value) -> Value:
    """Return floats where the mask holds, zero elsewhere."""
    place = f.emit("ptr", f"inttoptr {address.typed} to ptr")
    f.module.declare(
        "declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, <16 x float>)"
    )
    name = "@llvm.masked.load.v16f32.p0"
    return f.emit(
        VF32,
        f"call <16 x float> {name}(ptr {place.text}, i32 4, {mask.typed}, "
        "<16 x float> zeroinitializer)",
    )


def store_masked(f: Function, value: Value, address: Value, mask: Value) -> None:
    place = f.emit("ptr", f"inttoptr {address.typed} to ptr")
    f.module.declare("declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)")
    name = "@llvm.masked.store.v16f32.p0"
    f.write(f"call void {name}({value.typed}, ptr {place.text}, i32 4, {mask.typed})")


def first_lanes(f: Function, count: Value) -> Value:
    """Return a mask of the first `count` lanes."""
    return lane_numbers(f) < splat(f, count.to(I32))


# bfloat16 and float16


def bf16_to_float(f: Function, value: Value) -> Value:
    """value: 16 numbers as <16 x i16>"""
    return (value.unsigned_to(VI32) << 16).bits(VF32)


def float_to_bf16(f: Function, value: Value) -> Value:
    """Return <16 x i16>, rounded to the nearest, ties to even."""
    if f.level.bf16_dot:
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return f.intrinsic(vector(BF16), name, value).bits(VI16)
    bits = value.bits(VI32)
    rounded = bits + ((bits >> 16) & 1) + 0x7FFF
    return (rounded >> 16).to(VI16)


def load_bf16(f: Function, address: Value) -> Value:
    return bf16_to_float(f, f.load(VI16, address))


def store_bf16(f: Function, value: Value, address: Value) -> None:
    f.store(float_to_bf16(f, value), address)


def load_f16(f: Function, address: Value) -> Value:
    return f.load(vector(F16), address).to(VF32)


def dot_bf16(f: Function, total: Value, left: Value, right: Value) -> Value:
    """Return total + the products of pairs of bfloat16; left, right: a pair in each <16 x i32>."""
    if f.level.bf16_dot:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return f.intrinsic(VF32, name, total, left.bits(_V32BF16), right.bits(_V32BF16))
    low = fma(f, (left << 16).bits(VF32), (right << 16).bits(VF32), total)
    high = -65536
    return fma(f, (left & high).bits(VF32), (right & high).bits(VF32), low)


def dot_int8(f: Function, total: Value, left: Value, right: Value, four_bits: bool) -> Value:
    """Return total + the products of four bytes; left has bytes without sign, right with sign.

    four_bits: the bytes of left are at most 15
    """
    if f.level.int8_dot and f.level.vector_bits == 512:
        name = "llvm.x86.avx512.vpdpbusd.512"
        return f.intrinsic(VI32, name, total, left.bits(_V64I8), right.bits(_V64I8))
    if f.level.int8_dot:
        name = "llvm.x86.avx512.vpdpbusd.256"  # AVX2's form of the instruction, too
        parts = [
            f.intrinsic(_V8I32, name, *_bytes_of_half(f, first, total, left, right))
            for first in (0, 8)
        ]
        return shuffle(f, parts[0], parts[1], range(LANES))
    if f.level.machine != "x86_64":
        for shift in (24, 16, 8, 0):
            # arithmetic shifts keep the sign of the right byte
            total = total + ((left << shift) >> 24) * _shift_signed(f, right << shift, 24)
        return total
    if four_bits:
        return total + _multiply_small(f, left, right)
    # Sums of two products of whole bytes would not fit 16 bits: take the halves of the bytes.
    low = _multiply_small(f, left & 0x0F0F0F0F, right)
    high = _multiply_small(f, (left >> 4) & 0x0F0F0F0F, right)
    return total + low + (high << 4)


def _multiply_small(f: Function, left: Value, right: Value) -> Value:
    """Return the products of four bytes; those of left are at most 15."""
    if f.level.vector_bits == 512:
        sums = vector(I16, 32)
        bytes_of = [value.bits(_V64I8) for value in (left, right)]
        pairs = f.intrinsic(sums, "llvm.x86.avx512.pmaddubs.w.512", *bytes_of)
        return f.intrinsic(VI32, "llvm.x86.avx512.pmaddw.d.512", pairs, pairs.like(1))
    parts = []
    for first in (0, 8):
        _, *halves = _bytes_of_half(f, first, left, left, right)
        pairs = f.intrinsic(vector(I16, 16), "llvm.x86.avx2.pmadd.ub.sw", *halves)
        parts.append(f.intrinsic(_V8I32, "llvm.x86.avx2.pmadd.wd", pairs, pairs.like(1)))
    return shuffle(f, parts[0], parts[1], range(LANES))


def _bytes_of_half(
    f: Function, first: int, total: Value, left: Value, right: Value
) -> tuple[Value, Value, Value]:
    """Return 8 lanes from `first` on of the total, and the bytes of those of left and right."""
    lanes = range(first, first + 8)
    own, *others = (shuffle(f, value, value, lanes) for value in (total, left, right))
    return own, others[0].bits(vector(I8, 32)), others[1].bits(vector(I8, 32))


def _shift_signed(f: Function, value: Value, count: int) -> Value:
    by = value.like(count)
    return f.emit(value.kind, f"ashr {value.typed}, {by.text}")


# Functions


def exp(f: Function, x: Value) -> Value:
    """Return exp(x), about one unit in the last place from the truth; 0 below -87."""
    low = x < -87.0
    x = f.select(x > 88.0, f.value(VF32, 88.0), x)
    x = f.select(low, f.value(VF32, -87.0), x)
    turns = f.intrinsic(VF32, "llvm.rint.v16f32", x * 1.4426950408889634)
    rest = fma(f, turns, f.value(VF32, -0.693359375), x)
    rest = fma(f, turns, f.value(VF32, 2.12194440e-4), rest)
    total = f.value(VF32, 1.9875691500e-4)
    for factor in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        total = fma(f, total, rest, f.value(VF32, factor))
    total = fma(f, total, rest * rest, rest) + 1.0
    power = ((turns.to(VI32) + 127) << 23).bits(VF32)
    return f.select(low, f.value(VF32, 0.0), total * power)


def tanh(f: Function, x: Value) -> Value:
    return 1.0 - 2.0 / (exp(f, x * 2.0) + 1.0)


def sigmoid(f: Function, x: Value) -> Value:
    return 1.0 / (exp(f, -x) + 1.0)


def erf(f: Function, x: Value) -> Value:
    """Return erf(x), within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = absolute(f, x)
    t = 1.0 / (size * 0.3275911 + 1.0)
    total = f.value(VF32, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = fma(f, total, t, f.value(VF32, factor))
    found = 1.0 - total * t * exp(f, -(size * size))
    return f.select(x < 0.0, -found, found)


def activate(f: Function, kind: str, x: Value) -> Value:
    """Return an activation function of the MLP."""
    if kind == "silu":
        return x * sigmoid(f, x)
    if kind in ("relu", "relu_squared"):
        bounded = f.select(x > 0.0, x, f.value(VF32, 0.0))
        return bounded if kind == "relu" else bounded * bounded
    if kind == "gelu":
        return x * 0.5 * (erf(f, x * 0.7071067811865476) + 1.0)
    assert kind == "gelu_tanh"
    inner = (x + x * x * x * 0.044715) * 0.7978845608028654
    return x * 0.5 * (tanh(f, inner) + 1.0)
