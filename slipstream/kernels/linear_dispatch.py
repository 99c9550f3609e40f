"""Choose the linear layer for a weight, by its format and its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.kernels.linear import (
    ExpandedInt4Linear,
    Int4Linear,
    Int8Linear,
    Linear,
    OneDnnLinear,
    UnquantisedLinear,
)

if TYPE_CHECKING:
    from slipstream.kernels.gpu.linear import Fp32OutputLinear, InvariantFp32OutputLinear

_FP8_MULTIPLE = 16  # of the rows and the columns of a weight in an fp8 GEMM
# Hopper: the first devices whose library takes a scale per row and a scale per token
_FP8_CAPABILITY = (9, 0)


def unquantised(weight: Tensor, bias: Tensor | None) -> Linear:
    """weight: [out, in], bias: [out] or None."""
    if OneDnnLinear.supports(weight):
        return OneDnnLinear(weight, bias)
    if weight.device.type == "cuda":
        # imported here: a CPU installation has no Triton
        from slipstream.kernels.gpu.linear import GpuLinear

        return GpuLinear(weight, bias)
    return UnquantisedLinear(weight, bias)


def fp32_output(
    weight: Tensor, batch_invariant: bool = False
) -> Fp32OutputLinear | InvariantFp32OutputLinear | None:
    """Return the layer with float32 output, which may be written to an `out`; None where the
    device has no such kernel.
    """
    if weight.device.type != "cuda":
        return None
    from slipstream.kernels.gpu.linear import Fp32OutputLinear

    linear = Fp32OutputLinear(weight)
    return linear.batch_invariant() if batch_invariant else linear


def int8(weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """weight: int8 [out, in], scales: [out]; a row stands for weight × its scale."""
    if weight.device.type == "cuda":
        from slipstream.kernels.gpu.linear import WeightOnlyLinear

        return WeightOnlyLinear(weight.contiguous(), scales, bias)
    return Int8Linear(weight, scales, bias, dtype)


def int4(weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """weight, scales: as `expand_int4` takes them."""
    if Int4Linear.supports(weight):
        return Int4Linear(weight, scales, bias, dtype)
    return ExpandedInt4Linear(weight, scales, bias, dtype)


def fp8(
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fp8_inputs: bool = True,
) -> Linear:
    """weight: float8_e4m3fn [out, in], scales: float32 [out]; a row stands for weight × its scale.

    fp8_inputs: round activations to e4m3 as well where the device can.
    """
    if fp8_inputs and supports_fp8_gemm(weight, dtype, weight.device):
        from slipstream.kernels.gpu.linear import Fp8Linear

        return Fp8Linear(weight, scales, bias)
    on_gpu = weight.device.type == "cuda"
    if on_gpu and torch.cuda.get_device_capability(weight.device) >= _FP8_CAPABILITY:
        from slipstream.kernels.gpu.linear import WeightOnlyLinear

        return WeightOnlyLinear(weight.contiguous(), scales, bias)
    # Other devices have no kernel that reads e4m3: keep the weights that it stands for.
    return unquantised((weight.float() * scales[:, None]).to(dtype), bias)


def supports_fp8_gemm(weight: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device multiplies a weight [out, in] by e4m3 activations, in a run of
    type `dtype`.
    """
    if weight.dtype != torch.float8_e4m3fn or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    fits = all(size % _FP8_MULTIPLE == 0 for size in weight.shape)
    return fits and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
