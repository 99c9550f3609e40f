"""Quantise weights, some rows at a time, into the portable layout of an engine file.

Scales and offsets are values of bfloat16, because the kernels read them as bfloat16. The weights
are rounded with these values, so loading the engine adds no second rounding error.
"""

from __future__ import annotations

import torch

_LARGEST_E4M3 = 448.0


def quantise_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 weights [n, k] and float32 scales [n] of rows [n, k].

    The scale maps the largest element of a row to the largest e4m3 value.
    """
    floats = rows.float()
    scales = _round_to_bfloat16(floats.abs().amax(dim=1) / _LARGEST_E4M3)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    bounded = (floats / scales[:, None]).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3)
    return bounded.to(torch.float8_e4m3fn), scales


def quantise_rows(
    rows: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored weights and float32 scales of rows [n, k].

    The scales are [n] for 8 bits and [n, groups, 2] for 4 bits, with (scale, offset) last.
    """
    return _int8(rows.float()) if bits == 8 else _int4(rows.float(), group_size)


def _int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to int8 with one symmetric scale per row."""
    scales = _round_to_bfloat16(rows.abs().amax(dim=1) / 127.0)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows / scales[:, None]).round_().clamp_(-128, 127).to(torch.int8), scales


def _int4(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to 16 levels from the smallest to the largest value of a group.

    The offset is the value of level 8.
    """
    grouped = rows.unflatten(1, (-1, group))  # [n, groups, group]
    smallest = grouped.amin(dim=2, keepdim=True)
    largest = grouped.amax(dim=2, keepdim=True)
    scale = _round_to_bfloat16((largest - smallest) / 15.0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    offset = _round_to_bfloat16(smallest + 8.0 * scale)
    levels = ((grouped - offset) / scale).round_().add_(8.0).clamp_(0, 15)
    stored = levels.to(torch.uint8).flatten(1)
    return stored[:, 0::2] | (stored[:, 1::2] << 4), torch.cat((scale, offset), dim=2)


def _round_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
