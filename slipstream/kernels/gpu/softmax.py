"""Softmax over tiles of scores, taken one after the other."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squeeze(x):
    """tanh, from the one power the hardware has; near zero, where that would cancel, from its
    series.
    """
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0))


@triton.jit
def soften(scores, seen, best, mass, softcap, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Take a tile's scores into the running softmax → the best so far, the mass, the tile's
    weights, and by how much what was summed before shrinks
    """
    if SOFTCAP:
        scores = softcap * squeeze(scores / softcap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    safe = top
    if WINDOW:
        safe = tl.where(top == float("-inf"), 0.0, top)  # nothing of the chunk may be in sight yet
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    return top, mass * shrink + tl.sum(weights, 1), weights, shrink
