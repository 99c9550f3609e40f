"""Add to the residual stream and normalise it, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, overlapping, power_of_two, wait_and_trigger
from slipstream.kernels.gpu.quantised import new_quantised, store_quantised, warps_for
from slipstream.kernels.inputs import Input
from slipstream.kernels.normalisation import Norm


@CachedKernel
@triton.jit
def _add_norm(
    hidden,
    delta,
    weight,
    bias,
    normal,
    scales,
    size,
    epsilon,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    QUANTISE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    wait_and_trigger(OVERLAP)
    x = tl.load(hidden + row * size + column, inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * size + column, inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * size + column, x, inside)
    if CENTRE:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    y = x * gain
    if CENTRE:
        y += tl.load(bias + column, inside, other=0.0).to(tl.float32)
    if QUANTISE:
        store_quantised(y, normal, scales, row, column, inside, size)
    else:
        tl.store(normal + row * size + column, y.to(normal.dtype.element_ty), inside)


def add_norm(hidden: Tensor, delta: Tensor | None, norm: Norm) -> Input:
    """Add delta [tokens, size] to hidden, float32 [tokens, size], in place; return the sum
    normalised.
    """
    if not norm.quantise:
        return _plain(hidden, delta, norm)
    out = new_quantised(hidden.shape[0], hidden.shape[1], hidden.device)
    _launch(hidden, delta, norm, *out)
    return out


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """Return x [tokens, size] normalised, in the norm's type."""
    return _plain(x, None, norm)


def _plain(hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    normal = hidden.new_empty(hidden.shape, dtype=norm.result)
    _launch(hidden, delta, norm, normal, None)
    return normal


def _launch(
    hidden: Tensor, delta: Tensor | None, norm: Norm, normal: Tensor, scales: Tensor | None
) -> None:
    tokens, size = hidden.shape
    _add_norm[(tokens,)](
        hidden,
        delta,
        norm.weight,
        norm.bias,
        normal,
        scales,
        size,
        norm.epsilon,
        ADD=delta is not None,
        CENTRE=norm.bias is not None,
        QUANTISE=scales is not None,
        BLOCK=power_of_two(size),
        num_warps=warps_for(size),
        **overlapping(hidden.device),
    )
