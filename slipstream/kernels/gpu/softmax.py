"""Online softmax: scores are taken tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh from the hardware's exp2, and near zero, where that would cancel, from its
    series.
    """
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0))


@triton.jit
def online_softmax_update(
    scores,
    seen,
    best,
    mass,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Add a tile's scores to the running softmax. Return the new maximum and sum, the tile's
    weights, and the factor for what was accumulated before.
    """
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    safe = top
    if WINDOW:
        safe = tl.where(top == float("-inf"), 0.0, top)  # no token of the chunk may be visible yet
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    return top, mass * shrink + tl.sum(weights, 1), weights, shrink
