"""Add to the residual stream and normalise it, one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.normalisation import Norm


@triton.jit
def _add_norm(
    hidden, delta, weight, bias, normal, size, epsilon,
    ADD: tl.constexpr, CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(hidden + row * size + column, inside, other=0.0)
    if ADD:
        x += tl.load(delta + row * size + column, inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * size + column, x, inside)
    if CENTRE:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    # Rounded before the weight is applied, as the twin does.
    kind = normal.dtype.element_ty
    y = x.to(kind) * tl.load(weight + column, inside, other=0.0)
    if CENTRE:
        y = x * tl.load(weight + column, inside, other=0.0).to(tl.float32)
        y += tl.load(bias + column, inside, other=0.0).to(tl.float32)
    tl.store(normal + row * size + column, y.to(kind), inside)


def add_norm(hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    """hidden: float32 [tokens, size], changed in place; delta: [tokens, size] or None → [tokens, size]."""
    tokens, size = hidden.shape
    normal = hidden.new_empty((tokens, size), dtype=norm.weight.dtype)
    block = triton.next_power_of_2(size)
    _add_norm[(tokens,)](
        hidden, delta, norm.weight, norm.bias, normal, size, norm.epsilon,
        ADD=delta is not None, CENTRE=norm.bias is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return normal
