"""The float32 values of quantised weights."""

from __future__ import annotations

import torch


def dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 matrix [n, k] of stored weights and scales."""
    if weight.dtype in (torch.int8, torch.float8_e4m3fn):
        return weight.float() * scales[:, None]
    low = weight & 15
    high = weight >> 4
    values = torch.stack((low, high), dim=-1).flatten(1).float() - 8.0  # [n, k]
    # [n, groups, 1] each
    scale = scales[..., :1]
    offset = scales[..., 1:]
    grouped: torch.Tensor = values.unflatten(1, (scales.shape[1], -1)) * scale + offset
    return grouped.flatten(1)
