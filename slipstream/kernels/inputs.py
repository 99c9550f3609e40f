"""What a product may be given instead of a plain tensor: activations whose rows have yet to be
scaled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0  # the largest number e4m3 has


class Quantised(NamedTuple):
    """Eight bits (e4m3): a row of activations is worth its values times its scale."""

    values: Tensor  # float8_e4m3fn [tokens, size]
    scales: Tensor  # float32 [tokens, 1]


class Unscaled(NamedTuple):
    """One token, normalised but for its scale, which whoever multiplies the values gives the
    results: it was not known when several programs made the values.
    """

    values: Tensor  # [1, size], times the norm's weight
    # float32 [parts]: the sum of the squares of each part of the row, before that weight
    squares: Tensor
    epsilon: float  # of the norm

    @property
    def scales(self) -> Tensor:
        """float32 [1, 1]"""
        return torch.rsqrt(self.squares.sum() / self.values.shape[1] + self.epsilon).view(1, 1)


Input = Tensor | Quantised | Unscaled


def quantise(x: Tensor) -> Quantised:
    """x: [tokens, size]. The largest element of a row becomes the largest number there is."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Quantised((wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def plain(x: Input) -> Tensor:
    """The activations themselves, as nearly as x has them."""
    if isinstance(x, Tensor):
        return x
    return (x.values.float() * x.scales).to(
        torch.bfloat16 if isinstance(x, Quantised) else x.values.dtype
    )


def pick(x: Input, tokens: Tensor) -> Input:
    """The activations of these tokens."""
    if isinstance(x, Quantised):
        return Quantised(x.values[tokens], x.scales[tokens])
    return plain(x)[tokens]
