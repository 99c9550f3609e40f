"""Weight-only quantisation, rows at a time, in the portable layout of an engine file."""

from __future__ import annotations

import torch

from slipstream.weights.parameters import Quantisation

_EXTREME_LEVELS = (-8.0, -8.5, -9.0)  # beyond -8: cutting the extreme can leave the others a finer scale


def quantise_rows(rows: torch.Tensor, quantisation: Quantisation) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, k] → (stored weights, float32 scales)."""
    rows = rows.float()
    if quantisation.algorithm == "W8A16":
        return _int8(rows)
    return _int4(rows, quantisation.group_size)


def dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 matrix [n, k] that a stored pair stands for."""
    if weight.dtype == torch.int8:
        return weight.float() * scales[:, None]
    low, high = weight & 15, weight >> 4
    values = torch.stack((low, high), dim=-1).flatten(1).float() - 8.0  # [n, k]
    return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = rows.abs().amax(dim=1) / 127.0
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def _int4(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = rows.unflatten(1, (-1, group))  # [n, groups, group]
    # the value farthest from zero goes to -8, the one level without a positive twin, or is cut a little
    extreme = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True)).squeeze(2)  # [n, groups]
    levels, least = _levels(grouped, extreme / _EXTREME_LEVELS[0])
    for extreme_level in _EXTREME_LEVELS[1:]:
        others, error = _levels(grouped, extreme / extreme_level)
        levels = torch.where((error < least)[..., None], others, levels)
        least = torch.minimum(error, least)
    scales = (levels * grouped).sum(2) / (levels * levels).sum(2)  # the best for these levels
    scales = torch.where(extreme != 0, scales, torch.ones_like(scales))
    stored = levels.add_(8.0).to(torch.uint8).flatten(1)
    return stored[:, 0::2] | (stored[:, 1::2] << 4), scales


def _levels(grouped: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels -8..7 [n, groups, group] and the squared error of each group."""
    scales = torch.where(scales != 0, scales, torch.ones_like(scales))[..., None]
    levels = (grouped / scales).round_().clamp_(-8, 7)
    return levels, (levels * scales - grouped).square_().sum(2)
