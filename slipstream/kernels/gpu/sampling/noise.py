"""The noise of draws: a hash of seed, position and token. The same as in `kernels/sampling.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.sampling.table import SEED_HIGH, SEED_LOW, read_field


@triton.jit
def _mix_32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix_64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(table, row, length):
    """Return the 32-bit hash of a row's seed and the position of the token it draws."""
    low = read_field(table, row, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = read_field(table, row, SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = _mix_64((length + 1).to(tl.uint64))
    return (_mix_64(((high << 32) | low) ^ position) >> 32).to(tl.uint32)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: by the instruction of the GPU, with an absolute error of 2**-22; not for the smallest
    floats, whose treatment takes more instructions than the rest
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp(x, FAST: tl.constexpr):
    """Return e**x. FAST: by the instruction of the GPU; the smallest floats become 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(x)


@triton.jit
def gumbel(tokens, key, FAST: tl.constexpr):
    """Return the noise of tokens (int32) in a row with this noise key: -log(-log(uniform))."""
    return gumbel_of_hashes(_mix_32(tokens.to(tl.uint32, bitcast=True)), key, FAST)


@triton.jit
def gumbel_of_hashes(hashes, key, FAST: tl.constexpr):
    """Return the noise of tokens whose hashes (uint32) are known."""
    bits = _mix_32(hashes ^ key) >> 8
    uniform = bits.to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # Near 1, where the largest noise comes from, a series is exact to the last bits.
    rest = 1.0 - uniform
    series = rest + rest * rest * (0.5 + rest * (0.33333333 + rest * 0.25))
    exponential = tl.where(rest < 0.03125, series, -0.69314718 * _log2(uniform, FAST))
    return -0.69314718 * _log2(exponential, FAST)
