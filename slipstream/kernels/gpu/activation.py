"""The gated activation of the MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import (
    CachedKernel,
    overlapping,
    pieces,
    power_of_two,
    wait_and_trigger,
)
from slipstream.kernels.gpu.quantised import new_quantised, store_quantised, warps_for
from slipstream.kernels.inputs import Quantised

_BLOCK = 1024


@triton.jit
def silu_times(activated, multiplied):
    """Return silu(activated) × multiplied, in their type.

    silu(activated) is rounded to that type first, like in the torch reference.
    """
    fp32 = activated.to(tl.float32)
    return (fp32 * tl.sigmoid(fp32)).to(multiplied.dtype) * multiplied


@triton.jit
def _gate(x, row, column, inside, size):
    activated = tl.load(x + row * 2 * size + column, inside, other=0.0)
    return silu_times(activated, tl.load(x + row * 2 * size + size + column, inside, other=0.0))


@CachedKernel
@triton.jit
def _silu_gated(x, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_and_trigger(OVERLAP)
    tl.store(out + row * size + column, _gate(x, row, column, inside, size), inside)


@CachedKernel
@triton.jit
def _silu_gated_quantised(x, values, scales, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_and_trigger(OVERLAP)
    y = _gate(x, row, column, inside, size).to(tl.float32)
    store_quantised(y, values, scales, row, column, inside, size)


def silu_gated(x: Tensor) -> Tensor:
    """Return silu(first half) × second half: x [tokens, 2 * size] → [tokens, size]."""
    tokens = x.shape[0]
    size = x.shape[1] // 2
    out = x.new_empty((tokens, size))
    _silu_gated[(tokens, pieces(size, _BLOCK))](
        x, out, size, BLOCK=_BLOCK, num_warps=4, **overlapping(x.device)
    )
    return out


def silu_gated_quantised(x: Tensor) -> Quantised:
    """Like `silu_gated`, with the result quantised to e4m3."""
    tokens = x.shape[0]
    size = x.shape[1] // 2
    out = new_quantised(tokens, size, x.device)
    _silu_gated_quantised[(tokens,)](
        x,
        *out,
        size,
        BLOCK=power_of_two(size),
        num_warps=min(8, warps_for(size)),
        **overlapping(x.device),
    )
    return out
