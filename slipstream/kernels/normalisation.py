"""Add to the residual stream and normalise it: float32 [tokens, hidden] → [tokens, hidden] in the
norm's type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm where there is a bias, RMS norm where there is none."""

    weight: Tensor  # [size]
    bias: Tensor | None  # [size]
    epsilon: float
    # give the result in eight bits; only kernels that do it in the same pass pay heed
    quantise: bool = False
    dtype: torch.dtype | None = None  # of the result; None: the weight's

    @property
    def result(self) -> torch.dtype:
        return self.dtype or self.weight.dtype


def add_norm(hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    """hidden: float32 [tokens, size], to which delta [tokens, size] is added in place → the sum
    normalised.
    """
    if delta is not None:
        hidden.add_(delta)
    return normalise(hidden, norm)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """x: [tokens, size] → the same shape in the norm's type."""
    if norm.bias is None:
        return rms_norm(x, norm.weight, norm.epsilon, norm.result)
    normal = torch.layer_norm(
        x.float(), (x.shape[-1],), norm.weight.float(), norm.bias.float(), norm.epsilon
    )
    return normal.to(norm.result)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x: [..., size], weight: [size] → the shape of x. Computed in float32 and rounded once, to the
    type asked for.
    """
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), epsilon).to(dtype)
