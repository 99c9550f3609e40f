"""The only module that uses private operations of torch. pyproject.toml bounds torch's version, and
tests/kernels/test_torch_private.py fails when one of them is missing.

They read quantised or packed weights, for which torch has no public operation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_linear_weight(weight: Tensor) -> Tensor:
    """Return a bf16 weight [out, in] in oneDNN's own layout, which serves any number of tokens."""
    # The second argument is a hint at the number of tokens.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear layer of a weight that `pack_linear_weight` packed."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return x × weightᵀ for an int8 weight [out, in] with one scale per row [out]."""
    y: Tensor = torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    return y


def pack_int4_weight(values: Tensor) -> Tensor:
    """Return int32 values 0 to 15 [out, in] in the layout of `int4_linear`."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return packed


def int4_linear(x: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Return x × weightᵀ for a packed int4 weight.

    pairs: (scale, offset) of each group of inputs, [groups, out, 2]
    """
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs)
    return y


def fp8_linear(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the bf16 linear layer of e4m3 inputs and weights.

    x: [tokens, in]; weight: [out, in]; x_scales: [tokens, 1]; weight_scales: [out]
    """
    return torch._scaled_mm(
        x,
        weight.t(),
        x_scales,
        weight_scales[None, :],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
