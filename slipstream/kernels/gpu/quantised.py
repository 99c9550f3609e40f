"""Quantise activations to e4m3 in one pass over memory. The norm and the gate kernels quantise in
their own pass, with `store_quantised`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, overlapping, power_of_two, wait_and_trigger
from slipstream.kernels.inputs import Quantised


@triton.jit
def store_quantised(y, values, scales, row, column, inside, size):
    """Quantise and store y: float32 [BLOCK], a whole row of `size` elements."""
    scale = tl.maximum(tl.max(tl.where(inside, tl.abs(y), 0.0), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    bounded = tl.minimum(tl.maximum(y / scale, -448.0), 448.0)
    tl.store(values + row * size + column, bounded.to(values.dtype.element_ty), inside)


@CachedKernel
@triton.jit
def _quantise(x, values, scales, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_and_trigger(OVERLAP)
    y = tl.load(x + row * size + column, inside, other=0.0).to(tl.float32)
    store_quantised(y, values, scales, row, column, inside, size)


def quantise(x: Tensor) -> Quantised:
    """Quantise x [tokens, size], contiguous."""
    tokens, size = x.shape
    out = new_quantised(tokens, size, x.device)
    _quantise[(tokens,)](
        x, *out, size, BLOCK=power_of_two(size), num_warps=warps_for(size), **overlapping(x.device)
    )
    return out


def new_quantised(tokens: int, size: int, device: torch.device) -> Quantised:
    return Quantised(
        torch.empty((tokens, size), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((tokens, 1), dtype=torch.float32, device=device),
    )


def warps_for(size: int) -> int:
    """Return the warps of a CTA that holds a whole row."""
    return min(16, max(1, power_of_two(size) // 512))
