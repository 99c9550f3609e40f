"""Quantisation of weights, rows at a time, in the portable layout of an engine file.

Scales and offsets are chosen among the values bfloat16 has, because that is what the kernels read:
the weights are then rounded to levels that really occur, and nothing is lost a second time when the
engine loads.
"""

from __future__ import annotations

import torch

_LARGEST_E4M3 = 448.0


def quantise_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, k] → e4m3 weights [n, k] and float32 scales [n]: a row's largest element becomes
    e4m3's largest.
    """
    wide = rows.float()
    scales = _readable(wide.abs().amax(dim=1) / _LARGEST_E4M3)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    bounded = (wide / scales[:, None]).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3)
    return bounded.to(torch.float8_e4m3fn), scales


def quantise_rows(
    rows: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, k] → stored weights and float32 scales: [n] for 8 bits, [n, groups, (scale, offset)]
    for 4.
    """
    return _int8(rows.float()) if bits == 8 else _int4(rows.float(), group_size)


def dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 matrix [n, k] that a stored pair stands for."""
    if weight.dtype in (torch.int8, torch.float8_e4m3fn):
        return weight.float() * scales[:, None]
    low = weight & 15
    high = weight >> 4
    values = torch.stack((low, high), dim=-1).flatten(1).float() - 8.0  # [n, k]
    # [n, groups, 1] each
    scale = scales[..., :1]
    offset = scales[..., 1:]
    return (values.unflatten(1, (scales.shape[1], -1)) * scale + offset).flatten(1)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row, the same on both sides of zero."""
    scales = _readable(rows.abs().amax(dim=1) / 127.0)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / scales[:, None]).round_().clamp_(-128, 127).to(torch.int8), scales


def _int4(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sixteen levels from a group's smallest value to its largest; the offset is the level numbered
    8.
    """
    grouped = rows.unflatten(1, (-1, group))  # [n, groups, group]
    smallest = grouped.amin(dim=2, keepdim=True)
    largest = grouped.amax(dim=2, keepdim=True)
    scale = _readable((largest - smallest) / 15.0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    offset = _readable(smallest + 8.0 * scale)
    levels = ((grouped - offset) / scale).round_().add_(8.0).clamp_(0, 15)
    stored = levels.to(torch.uint8).flatten(1)
    return stored[:, 0::2] | (stored[:, 1::2] << 4), torch.cat((scale, offset), dim=2)


def _readable(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
