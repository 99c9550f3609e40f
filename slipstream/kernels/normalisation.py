"""Normalisation of hidden states: [tokens, hidden] → [tokens, hidden]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x: [..., size], weight: [size]. The mean square is taken in float32 whatever the type of x."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """x: [..., size], weight and bias: [size]."""
    return torch.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
