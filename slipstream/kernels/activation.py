"""Activation functions of the MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square_(),
}


def silu_gated(x: Tensor) -> Tensor:
    """Return silu(first half) × second half: x [tokens, 2 * ffn] → [tokens, ffn]."""
    return gated(x, functional.silu)


def clamped_gated(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return first half × sigmoid(alpha × first half) × (second half + 1), with both halves
    bounded by limit, the first from above only: x [tokens, 2 * ffn] → [tokens, ffn].
    """
    activated, multiplied = x.chunk(2, dim=-1)
    activated = activated.clamp(max=limit)
    multiplied = multiplied.clamp(-limit, limit)
    return activated * torch.sigmoid(activated * alpha) * (multiplied + 1.0)


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(first half) × second half: x [tokens, 2 * ffn] → [tokens, ffn]."""
    activated, multiplied = x.chunk(2, dim=-1)
    return activation(activated).mul_(multiplied)
