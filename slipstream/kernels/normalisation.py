"""Normalisation of hidden states: [tokens, hidden] in float32 → [tokens, hidden] in the type of the weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x: [..., size], weight: [size]. Computed in float32 whatever the types are."""
    return functional.rms_norm(x.float(), (x.shape[-1],), None, epsilon).to(weight.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """x: [..., size], weight and bias: [size]. Computed in float32 whatever the types are."""
    return torch.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), epsilon).to(weight.dtype)
