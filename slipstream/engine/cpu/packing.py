"""Turns the tensors of an engine into packed weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.cpu.pack import Packed, pack
from slipstream.kernels.cpu.pack_levels import QuantisedRows, pack_levels
from slipstream.kernels.linear import expand_int4, unpack_int4


def pack_tensor(tensor: Tensor, gated: bool) -> Packed:
    """Return a float32 or bfloat16 weight [outputs, inputs], packed."""
    if tensor.dtype == torch.bfloat16:
        return pack(tensor.contiguous().view(torch.uint16).numpy(), gated)
    return pack(tensor.contiguous().numpy(), gated)


def pack_quantised(
    name: str,
    weight: Tensor,
    scales: Tensor,
    shape: tuple[int, int],
    gated: bool,
    dtype: torch.dtype,
) -> Packed:
    """Return an int8 weight with a scale for each row, or an int4 weight in groups, packed.

    In a float32 run it is expanded, because activations in 8 bits would round more than float32
    promises. So are formats that compiled code lacks.
    """
    outputs, inputs = shape
    if weight.dtype == torch.int8 and tuple(weight.shape) == shape:
        rows = QuantisedRows(weight.numpy(), scales.float().numpy().reshape(-1, 1), None)
        packed = pack_levels(rows, gated) if dtype == torch.bfloat16 else None
        return packed or pack_tensor((weight.float() * scales[:, None]).to(dtype), gated)
    if weight.dtype == torch.uint8 and tuple(weight.shape) == (outputs, inputs // 2):
        numbers = scales.float()
        levels = unpack_int4(weight).to(torch.int8) - 8
        rows = QuantisedRows(
            levels.numpy(),
            np.ascontiguousarray(numbers[..., 0].numpy()),
            np.ascontiguousarray(numbers[..., 1].numpy()),
        )
        packed = pack_levels(rows, gated) if dtype == torch.bfloat16 else None
        return packed or pack_tensor(expand_int4(weight, scales, dtype), gated)
    if weight.dtype == torch.float8_e4m3fn and tuple(weight.shape) == shape:
        return pack_tensor((weight.float() * scales[:, None]).to(dtype), gated)
    raise ValueError(
        f"{name}.weight: {weight.dtype} {tuple(weight.shape)} is no form of [{outputs}, {inputs}]"
    )
