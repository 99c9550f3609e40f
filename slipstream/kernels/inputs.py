"""Inputs of linear layers: plain tensors, or activations whose rows are still to be scaled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0  # largest e4m3 number


class Quantised(NamedTuple):
    """e4m3 activations: a row stands for its values times its scale."""

    values: Tensor  # float8_e4m3fn [tokens, size]
    scales: Tensor  # float32 [tokens, 1]


class Unscaled(NamedTuple):
    """A normalised row whose RMS factor is still to be applied.

    The next GEMV applies the RMS factor to its output: the factor is known only when all CTAs of
    this one are done.
    """

    values: Tensor  # [1, size], times the norm's weight
    squares: Tensor  # float32 [parts]: sum of squares of each part of the row, before that weight
    epsilon: float  # the norm's epsilon

    @property
    def scales(self) -> Tensor:
        """The RMS factor: float32 [1, 1]"""
        return torch.rsqrt(self.squares.sum() / self.values.shape[1] + self.epsilon).view(1, 1)


Input = Tensor | Quantised | Unscaled


def quantise(x: Tensor) -> Quantised:
    """Quantise x [tokens, size]. The largest element of a row becomes the largest e4m3 number."""
    fp32 = x.float()
    scales = fp32.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Quantised((fp32 / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def plain(x: Input) -> Tensor:
    """Return the activations that x stands for."""
    if isinstance(x, Tensor):
        return x
    dtype = torch.bfloat16 if isinstance(x, Quantised) else x.values.dtype
    return (x.values.float() * x.scales).to(dtype)


def pick(x: Input, tokens: Tensor) -> Input:
    """Return the activations of these tokens."""
    if isinstance(x, Quantised):
        return Quantised(x.values[tokens], x.scales[tokens])
    return plain(x)[tokens]
