"""MXFP4: 4-bit floats (e2m1). Each 32 columns share a scale, a power of two.

The experts of a layer are one tensor: `P_blocks` [experts, out, groups, 16] holds two columns in a
byte, `P_scales` [experts, out, groups] the exponents. They are read as `P.weight`, with the
dimensions that the unquantised model has: [experts, in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slipstream.weights.parameters import Shape
from slipstream.weights.sources.quantised.layer import QuantisedLayer

if TYPE_CHECKING:
    import torch

# the values of the first eight codes; the others are the same with a minus
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_GROUP_BYTES = 16


def experts_shape(layer: QuantisedLayer) -> Shape:
    """Return the shape of the experts, [experts, in, out]."""
    blocks = layer.slot("blocks").shape
    scales = layer.slot("scales").shape
    if len(blocks) != 4 or blocks[3] != _GROUP_BYTES or blocks[:3] != scales:
        raise layer.misfit("blocks", f"scales has shape {list(scales)}")
    experts, rows, groups, _ = blocks
    return experts, groups * 2 * _GROUP_BYTES, rows


def read_experts(layer: QuantisedLayer) -> Iterator[torch.Tensor]:
    """Yield one expert after the other, bfloat16 [1, in, out]."""
    blocks = layer.tensor("blocks")
    scales = layer.tensor("scales")
    for expert in range(len(blocks)):
        yield expand_mxfp4(blocks[expert], scales[expert]).t().contiguous()[None]


def expand_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrices of MXFP4 blocks, bfloat16 [..., out, in], which rounds nothing.

    blocks: uint8 [..., out, groups, 16], the first of two columns in the low half of a byte
    scales: uint8 [..., out, groups], exponents of two plus 127
    """
    import torch

    if blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks of shape {list(blocks.shape)} have scales of shape {list(scales.shape)}"
        )
    table = torch.tensor((*_VALUES, *(-value for value in _VALUES)))
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., groups, 32]
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    weights = torch.ldexp(table[codes.long()], exponents[..., None])
    return weights.flatten(-2).to(torch.bfloat16)
