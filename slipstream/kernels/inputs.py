"""What a product may be given instead of a plain tensor: activations in eight bits (e4m3), one scale a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0  # the largest number e4m3 has


class Quantised(NamedTuple):
    """A row of activations is worth its values times its scale."""

    values: Tensor  # float8_e4m3fn [tokens, size]
    scales: Tensor  # float32 [tokens, 1]


Input = Tensor | Quantised


def quantise(x: Tensor) -> Quantised:
    """x: [tokens, size]. The largest element of a row becomes the largest number there is."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Quantised((wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def plain(x: Input) -> Tensor:
    """The activations themselves, as nearly as x has them."""
    return (x.values.float() * x.scales).to(torch.bfloat16) if isinstance(x, Quantised) else x


def pick(x: Input, tokens: Tensor) -> Input:
    """The activations of these tokens."""
    return Quantised(x.values[tokens], x.scales[tokens]) if isinstance(x, Quantised) else x[tokens]
