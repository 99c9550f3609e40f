"""Add to the residual stream and normalise it: RMS norm and layer norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm with a bias, RMS norm without one."""

    weight: Tensor  # [size]
    bias: Tensor | None  # [size]
    epsilon: float
    # return the result in e4m3; only kernels that quantise in the same pass do so
    quantise: bool = False
    dtype: torch.dtype | None = None  # type of the result; None: the weight's type

    @property
    def result(self) -> torch.dtype:
        return self.dtype or self.weight.dtype


def add_norm(hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    """Add delta [tokens, size] to hidden, float32 [tokens, size], in place; return the sum
    normalised.
    """
    if delta is not None:
        hidden.add_(delta)
    return normalise(hidden, norm)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """Return x [tokens, size] normalised, in the norm's type."""
    if norm.bias is None:
        return rms_norm(x, norm.weight, norm.epsilon, norm.result)
    normal = torch.layer_norm(
        x.float(), (x.shape[-1],), norm.weight.float(), norm.bias.float(), norm.epsilon
    )
    return normal.to(norm.result)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Return x [..., size] normalised and times weight [size]: computed in float32, rounded once to
    `dtype`.
    """
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), epsilon).to(dtype)
