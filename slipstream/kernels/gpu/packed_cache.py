"""Read and write the 12-bit KV cache inside kernels. `kernels/packed_cache.py` describes the
format.

RUN is a quarter of a head's size: the words of a run, and the columns of each of a head's four
parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels import packed_cache
from slipstream.kernels.gpu.bf12 import FOUR_RUNS, unpacked, widened

_TOKENS = tl.constexpr(packed_cache.TOKENS)
# Scales in the cache are too small by this factor, because float32 has no 2^240. With a larger
# factor sums would become too small; with a smaller one large numbers would have no scale.
UP = tl.constexpr(2.0**64)
_AFTER_UNPACKED = tl.constexpr(2.0**64 * 2.0**-112)  # factor left after `unpacked`
_RAW = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, t;
    mov.b32 a, $4;
    mov.b32 b, $5;
    mov.b32 c, $6;
"""
    + FOUR_RUNS
    + """
    mov.b32 $0, a;
    mov.b32 $1, b;
    mov.b32 $2, c;
    mov.b32 $3, d;
}"""
)
# Pack two numbers of each run at a time. They are scaled down in two steps: the whole factor may be
# out of range.
_PACKED = tl.constexpr("""{
    .reg .b32 a, b, c, d, t, nothing;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 a, $3, $7, nothing;
    fma.rn.bf16x2 b, $4, $7, nothing;
    fma.rn.bf16x2 c, $5, $7, nothing;
    fma.rn.bf16x2 d, $6, $7, nothing;
    fma.rn.bf16x2 a, a, $8, nothing;
    fma.rn.bf16x2 b, b, $8, nothing;
    fma.rn.bf16x2 c, c, $8, nothing;
    fma.rn.bf16x2 d, d, $8, nothing;
    shl.b32 t, d, 11;
    lop3.b32 $0, t, 0x78007800, a, 0xEA;
    shl.b32 t, d, 7;
    lop3.b32 $1, t, 0x78007800, b, 0xEA;
    shl.b32 t, d, 3;
    lop3.b32 c, t, 0x38003800, c, 0xEA;
    shr.u32 t, d, 1;
    lop3.b32 $2, t, 0x40004000, c, 0xEA;
}""")


@triton.jit
def column(part: tl.constexpr, RUN: tl.constexpr):
    """Return the columns of one part of a head."""
    return part // 2 * (2 * RUN) + part % 2 + 2 * tl.arange(0, RUN)


@triton.jit
def _place(head, cache_slots, slot, RUN: tl.constexpr):
    """Return the positions of a slot's words of the first run, and of its scale. The next run is
    _TOKENS * RUN words further.
    """
    offset = slot % _TOKENS
    begin = head.to(tl.int64) * cache_slots * (3 * RUN + 2) + slot // _TOKENS * (
        _TOKENS * (3 * RUN + 2)
    )
    return begin + offset * RUN, begin + _TOKENS * 3 * RUN + offset


@triton.jit
def read_words(cache, head, cache_slots, slot, seen, RUN: tl.constexpr):
    """Load slots of one head: the words of three runs, and the scales."""
    words, scales = _place(head, cache_slots, slot, RUN)
    at = cache + words[:, None] + tl.arange(0, RUN)[None, :]
    first = tl.load(at, seen[:, None], other=0)
    second = tl.load(at + _TOKENS * RUN, seen[:, None], other=0)
    third = tl.load(at + 2 * _TOKENS * RUN, seen[:, None], other=0)
    # Scales are loaded in pairs: loads below four bytes are not pipelined.
    pairs = tl.load(cache.to(tl.pointer_type(tl.int32)) + scales // 2, seen, other=0)
    return (
        first,
        second,
        third,
        (pairs >> (scales % 2 * 16).to(tl.int32) << 16).to(tl.float32, bitcast=True),
    )


@triton.jit
def raw(first, second, third, ON_DEVICE: tl.constexpr):
    """Convert words of three runs to four parts, bfloat16 (float32 in the interpreter), to be
    multiplied by the token's scale and UP. Until then they are subnormal: tensor cores take them,
    other instructions may flush them to zero.
    """
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            _RAW,
            "=r,=r,=r,=r,r,r,r",
            [first, second, third],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return widened(first, second, third, False)


@triton.jit
def read_whole(
    cache,
    head,
    cache_slots,
    slot,
    seen,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Load tokens of one head, unpacked: [tokens, 4 × RUN]."""
    first, second, third, scale = read_words(cache, head, cache_slots, slot, seen, RUN)
    a, b, c, d = unpacked(first, second, third, KIND, ON_DEVICE)
    runs = tl.join(tl.join(a, b), tl.join(c, d))  # [token, index, odd or even, half]
    whole = tl.reshape(tl.permute(runs, (0, 3, 1, 2)), (seen.shape[0], 4 * RUN))
    return (whole * (scale * _AFTER_UNPACKED)[:, None]).to(KIND)


@triton.jit
def pack(first, second, ON_DEVICE: tl.constexpr):
    """Pack heads, given as halves [heads, 2 × RUN]: the words of three runs, and the scales."""
    HEADS: tl.constexpr = first.shape[0]
    RUN: tl.constexpr = first.shape[1] // 2
    one = first.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    other = second.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.maximum(one, other), 1, keep_dims=True)
    least = tl.maximum((largest >> 23) - 15, 0)  # the exponent that becomes zero
    a, b = tl.split(tl.reshape(first, (HEADS, RUN, 2)))
    c, d = tl.split(tl.reshape(second, (HEADS, RUN, 2)))
    x, y, z = _pack(a, b, c, d, _down(least // 2), _down(least - least // 2), ON_DEVICE)
    # Infinity, nan and numbers from 2^80 on make the scale infinite.
    return x, y, z, (tl.minimum(least + 63, 255) << 7).to(tl.int16)


@triton.jit
def write(
    cache,
    x,
    y,
    z,
    scale,
    head,
    slot,
    held,
    cache_slots,
):
    """Store the result of `pack` to a token's slot."""
    RUN: tl.constexpr = x.shape[1]
    words, scales = _place(head, cache_slots, slot, RUN)
    at = cache + words + tl.arange(0, RUN)[None, :]
    tl.store(at, x, held)
    tl.store(at + _TOKENS * RUN, y, held)
    tl.store(at + 2 * _TOKENS * RUN, z, held)
    tl.store(cache + scales, scale, held)


@triton.jit
def _down(exponent):
    return ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pack(a, b, c, d, down, rest, ON_DEVICE: tl.constexpr):
    if ON_DEVICE:
        down = tl.broadcast_to(down.to(tl.bfloat16), a.shape)
        rest = tl.broadcast_to(rest.to(tl.bfloat16), a.shape)
        return tl.inline_asm_elementwise(
            _PACKED,
            "=r,=r,=r,r,r,r,r,r,r",
            [a, b, c, d, down, rest],
            dtype=(tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        last = _bits(d, down, rest)
        x = _bits(a, down, rest) | (last & 0x000F) << 11
        y = _bits(b, down, rest) | (last & 0x00F0) << 7
        z = _bits(c, down, rest) | (last & 0x0700) << 3 | (last & 0x8000) >> 1
        return x.to(tl.int16), y.to(tl.int16), z.to(tl.int16)


@triton.jit
def _bits(x, down, rest):
    """Round to bfloat16: to the nearest, ties to even."""
    bits = (x.to(tl.float32) * down * rest).to(tl.int32, bitcast=True)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF
