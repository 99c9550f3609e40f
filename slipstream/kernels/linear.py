"""Matrix products with stored weights: dense, int8, int4 and fp8. x: [tokens, in_features] →
[tokens, out_features].

On CPU a decode step is bound by reading the weights, so bf16 weights are laid out once the way
oneDNN reads them, and int8 and int4 ones go through torch's weight-only kernels. Those kernels are
made for few tokens; for many, the weights are expanded for the one product, which costs less than
it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.inputs import Input
from slipstream.kernels.normalisation import Norm

Product = Callable[[Any], Tensor]  # of an Input; on a CPU, of a plain tensor
Joint = Callable[[Any, Tensor], Input]  # of activations and the residual stream: see `joint`

# Above this many tokens expanding quantised weights beats the weight-only kernels
# (benchmarks/kernels.py).
_EXPAND_ABOVE_TOKENS = 48
_INT4_ROWS = 16  # the four-bit kernel takes weights of a multiple of this many rows
_EIGHT_BIT_SIZES = 16  # what the rows and the columns of an eight-bit weight must be multiples of
# Hopper: the first whose library takes a scale a row and a scale a token
_EIGHT_BIT_DEVICES = (9, 0)


def dense(weight: Tensor, bias: Tensor | None) -> Product:
    """weight: [out, in], bias: [out] or None."""
    if _packs(weight):
        # The second argument is only a hint at the number of tokens; the layout serves every
        # number.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    if weight.device.type == "cuda":
        # needs Triton, which a CPU installation lacks
        from slipstream.kernels.gpu.linear import DenseProduct

        return DenseProduct(weight, bias)
    return lambda x: functional.linear(x, weight, bias)


def gated(product: Product) -> Product | None:
    """The product with the silu gate behind it, where one kernel does both for some numbers of
    tokens; else None.
    """
    return getattr(product, "gated", None)


def prepare_gate(product: Product) -> None:
    """Have kernels compiled that gate numbers of tokens which the steps of a start may not have."""
    if hasattr(product, "prepare_gate"):
        product.prepare_gate()


def joint(product: Product, norm: Norm | None, taker: Product) -> Joint | None:
    """One kernel that multiplies a single token, adds the result to the residual stream and
    normalises the sum for the product that takes it; None where there is no such kernel.
    """
    if norm is None or not (hasattr(product, "joined") and hasattr(taker, "takes_unscaled")):
        return None
    # What is not scaled yet may be beyond float16. Eight bits need the scale first.
    if norm.bias is not None or norm.quantise or norm.result != torch.bfloat16:
        return None
    return partial(product.joined, norm=norm)


def wide(weight: Tensor) -> Callable[..., Tensor] | None:
    """The product whose result is float32 and may go to an `out`; None where there is no such
    kernel.
    """
    if weight.device.type != "cuda":
        return None
    from slipstream.kernels.gpu.linear import WideProduct

    return WideProduct(weight)


def copy_weights(products: Iterable[Product], most_bytes: int) -> int:
    """Keep copies of 16-bit weights that few tokens read faster, if all of them take no more than
    so many bytes → what they take
    """
    stored = [product.stored for product in products if hasattr(product, "stored")]
    if sum(weight.copy_bytes for weight in stored) > most_bytes:
        return 0
    return sum(weight.copy() for weight in stored)


def int8(weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """weight: int8 [out, in], scales: [out]; an element is worth weight × its row's scale."""
    if weight.device.type == "cuda":
        from slipstream.kernels.gpu.linear import WeightOnlyProduct

        return WeightOnlyProduct(weight.contiguous(), scales, bias)
    weight, scales = weight.contiguous(), scales.to(dtype)

    def product(x: Tensor) -> Tensor:
        if x.shape[0] > _EXPAND_ABOVE_TOKENS or not _weight_only_runs(x):
            return functional.linear(x, weight.to(dtype) * scales[:, None], bias)
        y = torch.ops.aten._weight_int8pack_mm(x, weight, scales)
        return y if bias is None else y.add_(bias)

    return product


def int4(weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """weight: uint8 [out, in / 2], element 2j in the low four bits; scales: [out, in / group,
    (scale, offset)].

    An element is worth (value - 8) × the scale of its group + the offset of its group.
    """
    if weight.device.type != "cpu" or weight.shape[0] % _INT4_ROWS:
        return lambda x: functional.linear(x, expand_int4(weight, scales, dtype), bias)
    group = weight.shape[1] * 2 // scales.shape[1]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(weight).int(), 1)
    pairs = scales.transpose(0, 1).to(dtype).contiguous()  # the kernel wants groups outermost

    def product(x: Tensor) -> Tensor:
        if x.shape[0] > _EXPAND_ABOVE_TOKENS or not _weight_only_runs(x):
            return functional.linear(x, expand_int4(weight, scales, dtype), bias)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs)
        return y if bias is None else y.add_(bias)

    return product


def fp8(
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    eight_bit_inputs: bool = True,
) -> Product:
    """weight: float8_e4m3fn [out, in], scales: float32 [out]; an element is worth weight × its
    row's scale.

    `eight_bit_inputs`: where the device can, activations are rounded to e4m3 as well.
    """
    if eight_bit_inputs and multiplies_eight_bits(weight, dtype, weight.device):
        from slipstream.kernels.gpu.linear import EightBitProduct

        return EightBitProduct(weight, scales, bias)
    if (
        weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device) >= _EIGHT_BIT_DEVICES
    ):
        from slipstream.kernels.gpu.linear import WeightOnlyProduct

        return WeightOnlyProduct(weight.contiguous(), scales, bias)
    # Elsewhere nothing multiplies eight-bit numbers: what they stand for is kept.
    return dense((weight.float() * scales[:, None]).to(dtype), bias)


def multiplies_eight_bits(weight: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies a weight [out, in] with activations of eight bits, in a run of
    this type.
    """
    if weight.dtype != torch.float8_e4m3fn or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    fits = all(size % _EIGHT_BIT_SIZES == 0 for size in weight.shape)
    return fits and torch.cuda.get_device_capability(device) >= _EIGHT_BIT_DEVICES


def unpack_int4(weight: Tensor) -> Tensor:
    """uint8 [out, in / 2] → uint8 [out, in] with values 0..15."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)


def expand_int4(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that the four-bit values stand for: [out, in]."""
    values = unpack_int4(weight).to(dtype).sub_(8).unflatten(1, (scales.shape[1], -1))
    return torch.addcmul(scales[..., 1:].to(dtype), values, scales[..., :1].to(dtype)).flatten(1)


def _packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    )


def _weight_only_runs(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16
