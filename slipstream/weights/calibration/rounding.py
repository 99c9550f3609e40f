"""Four-bit groups as the blocks of Q4_1 hold them: 16 levels from an offset on.

weight = scale × level + offset, with float16 scale and offset for each 32 columns
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.weights.sources.quantised.kept import Kept, byte_blocks, nibble_blocks

GROUP = 32  # columns
FORM = "Q4_1"
_LEVELS = 15
# how far the ends of a group are moved inwards in a search
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)


class Groups(NamedTuple):
    """The levels' values in each group of the rows of a matrix."""

    scales: Tensor  # float32 [rows, groups], exact in float16
    offsets: Tensor  # float32 [rows, groups], exact in float16

    def levels(self, weight: Tensor) -> Tensor:
        """Return the nearest levels of weights [rows, columns], float32."""
        grouped = weight.unflatten(1, (-1, GROUP))
        found = (grouped - self.offsets[..., None]) / self.scales[..., None]
        levels: Tensor = found.round_().clamp_(0, _LEVELS).flatten(1)
        return levels

    def values(self, levels: Tensor) -> Tensor:
        """Return the weights that levels [rows, columns] stand for."""
        grouped = levels.unflatten(1, (-1, GROUP))
        weights: Tensor = (grouped * self.scales[..., None] + self.offsets[..., None]).flatten(1)
        return weights

    def round(self, weight: Tensor) -> Tensor:
        """Return the nearest weights that levels can stand for."""
        return self.values(self.levels(weight))


def whole_groups(weight: Tensor) -> Groups:
    """Return groups from the smallest to the largest weight."""
    grouped = weight.unflatten(1, (-1, GROUP))
    return _groups(grouped.amin(2), grouped.amax(2))


def fitted_groups(weight: Tensor, hessian: Tensor) -> Groups:
    """Return groups that cut off large weights where the others gain more from finer levels.

    hessian: [columns, columns]: see `InputStatistics`. The error of a group is that of its part of
    the output.
    """
    grouped = weight.unflatten(1, (-1, GROUP))
    count = grouped.shape[1]
    index = torch.arange(count)
    blocks = hessian.view(count, GROUP, count, GROUP)[index, :, index]  # [groups, 32, 32]
    low = grouped.amin(2)
    high = grouped.amax(2)
    best = _groups(low, high)
    least = _group_errors(weight, best, blocks)
    for down in _SHRINK:
        for up in _SHRINK:
            tried = _groups(low * down, high * up)
            error = _group_errors(weight, tried, blocks)
            better = error < least
            least = torch.where(better, error, least)
            best = Groups(
                torch.where(better, tried.scales, best.scales),
                torch.where(better, tried.offsets, best.offsets),
            )
    return best


def output_error(change: Tensor, hessian: Tensor) -> float:
    """Return the squared error of the outputs for a change of the weights [rows, columns]."""
    return float(((change @ hessian) * change).sum())


def q4_1_rows(levels: Tensor, groups: Groups) -> np.ndarray:
    """Return rows of Q4_1 blocks, uint8 [rows, row bytes]."""
    numbers = levels.to(torch.uint8).numpy()
    kept = Kept(FORM, numbers, groups.scales.numpy(), groups.offsets.numpy())
    return nibble_blocks(kept)


def q8_0_rows(weight: Tensor) -> np.ndarray:
    """Return the rows of a matrix in Q8_0 blocks, uint8 [rows, row bytes]."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = _nonzero((grouped.abs().amax(2) / 127).half().float())
    numbers = (grouped / scales[..., None]).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
    return byte_blocks(Kept("Q8_0", numbers.numpy(), scales.numpy(), None))


def _groups(low: Tensor, high: Tensor) -> Groups:
    scales = _nonzero(((high - low) / _LEVELS).half().float())
    return Groups(scales, low.half().float())


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _group_errors(weight: Tensor, groups: Groups, blocks: Tensor) -> Tensor:
    """Return the error of each group [rows, groups]. blocks: [groups, 32, 32]"""
    change = (groups.round(weight) - weight).unflatten(1, (-1, GROUP)).transpose(0, 1)
    errors: Tensor = (torch.bmm(change, blocks) * change).sum(2)  # [groups, rows]
    return errors.t()
