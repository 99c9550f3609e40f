"""Unpack 12-bit weights inside GEMM kernels. `kernels/bf12.py` describes the format."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels import bf12

RUN = tl.constexpr(bf12.RUN)
GROUP = tl.constexpr(bf12.GROUP)
WORDS = tl.constexpr(3 * bf12.RUN)  # words of a group

# Unpack two numbers of each run at a time. a, b and c hold words of the three runs, and then
# numbers of the first three; d holds numbers of the fourth.
FOUR_RUNS = """
    shr.u32 d, a, 11;
    and.b32 d, d, 0x000F000F;
    shr.u32 t, b, 7;
    lop3.b32 d, t, 0x00F000F0, d, 0xEA;
    shr.u32 t, c, 3;
    lop3.b32 d, t, 0x07000700, d, 0xEA;
    shl.b32 t, c, 1;
    lop3.b32 d, t, 0x80008000, d, 0xEA;
    and.b32 a, a, 0x87FF87FF;
    and.b32 b, b, 0x87FF87FF;
    and.b32 c, c, 0x87FF87FF;
"""
_SCALED = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, t, up, nothing;
    mov.b32 a, $4;
    mov.b32 b, $5;
    mov.b32 c, $6;
"""
    + FOUR_RUNS
    + """
    mov.b32 up, 0x77807780;
    mov.b32 nothing, 0x80008000;
    fma.rn.bf16x2 $0, a, up, nothing;
    fma.rn.bf16x2 $1, b, up, nothing;
    fma.rn.bf16x2 $2, c, up, nothing;
    fma.rn.bf16x2 $3, d, up, nothing;
}"""
)
_WIDENED = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, t;
    mov.b32 a, $8;
    mov.b32 b, $9;
    mov.b32 c, $10;
"""
    + FOUR_RUNS
    + """
    shl.b32 $0, a, 16;
    and.b32 $1, a, 0xFFFF0000;
    shl.b32 $2, b, 16;
    and.b32 $3, b, 0xFFFF0000;
    shl.b32 $4, c, 16;
    and.b32 $5, c, 0xFFFF0000;
    shl.b32 $6, d, 16;
    and.b32 $7, d, 0xFFFF0000;
}"""
)


@triton.jit
def unpacked(first, second, third, KIND: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Convert words of three runs to numbers of four runs, without their row's scale: bfloat16, or
    KIND in the interpreter, which has no bfloat16.
    """
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            _SCALED,
            "=r,=r,=r,=r,r,r,r",
            [first, second, third],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = widened(first, second, third, ON_DEVICE)
        up = 5.192296858534828e33  # 2^112
        return (a * up).to(KIND), (b * up).to(KIND), (c * up).to(KIND), (d * up).to(KIND)


@triton.jit
def widened(first, second, third, ON_DEVICE: tl.constexpr):
    """Convert the same to float32, too small by 2^112: a GEMV corrects it faster in its sums."""
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            _WIDENED,
            "=f,=f,=f,=f,=f,=f,=f,=f,r,r,r",
            [first, second, third],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=2,
        )
    else:
        a = first.to(tl.int32)
        b = second.to(tl.int32)
        c = third.to(tl.int32)
        d = a >> 11 & 0x000F | b >> 7 & 0x00F0 | c >> 3 & 0x0700 | c << 1 & 0x8000
        return _float(a), _float(b), _float(c), _float(d)


@triton.jit
def _float(bits):
    return ((bits & 0x87FF) << 16).to(tl.float32, bitcast=True)
