"""Products with weights on the GPU: own kernels for few tokens, the libraries' for many, but for
those with a gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.bf12 import Bf12Weight, pack
from slipstream.kernels.gpu.activation import silu_gated
from slipstream.kernels.gpu.gated_gemm import gated_gemm, pays, supports_gated_gemm
from slipstream.kernels.gpu.gemv import fused_gemv, gemv
from slipstream.kernels.gpu.quantised import quantise
from slipstream.kernels.gpu.skinny_gemm import gates, skinny_gemm, supports_bf12
from slipstream.kernels.inputs import Input, Quantised, Unscaled, plain
from slipstream.kernels.normalisation import Norm

# Tokens up to which the own kernel is ahead of the library, by the bytes it reads.
_FEW_DENSE = 32
_FEW_EIGHT_BITS = _FEW_SMALL = 64
_SMALL = 2**23  # numbers of a weight that is read in less time than the library takes to begin
_NARROW = 1024  # columns up to which a program has too little to read for unpacking to go beside it
# tokens up to which cuBLASLt is ahead of cuBLAS, by 1 to 4% on an H200; with thousands it is behind
_LIGHT = 192


@contextmanager
def suited_library(tokens: int) -> Iterator[None]:
    """Meanwhile, products of 16-bit weights use the library that is fastest for so many tokens. For
    steps that are recorded: the choice is the whole process's, and making it takes time.
    """
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if tokens <= _LIGHT else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class _Stored:
    """A weight of the activations' own type, and its copy in twelve bits that few tokens read,
    where there is one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [out, in]
        self.few = (
            1
            if weight.dtype == torch.float32
            else _FEW_SMALL
            if weight.numel() <= _SMALL
            else _FEW_DENSE
        )
        self._copy: Bf12Weight | None = None

    @property
    def copy_bytes(self) -> int:
        """What a copy's words would take, beside which its scales are little; none where it would
        be no faster.
        """
        large = self.weight.numel() > _SMALL and self.weight.shape[1] > _NARROW
        return self.weight.numel() * 3 // 2 if large and supports_bf12(self.weight) else 0

    def copy(self) -> int:
        """Make the copy → its bytes; none where it might be felt"""
        self._copy = pack(self.weight) if self.copy_bytes else None
        return self.copy_bytes if self._copy is not None else 0

    def read(self) -> tuple[Tensor, Tensor | None]:
        """What up to `few` tokens are multiplied with: a weight, and its scales where it has twelve
        bits.
        """
        return (self.weight, None) if self._copy is None else self._copy


class DenseProduct:
    """Weights of the activations' own type."""

    takes_unscaled = True  # of one token

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.stored, self.bias = _Stored(weight), bias  # [out, in], [out]
        self._turned = weight.t()
        self._gates = gates(weight)
        self._supports_gated_gemm = bias is None and supports_gated_gemm(weight)

    def __call__(self, x: Input) -> Tensor:
        x = x if isinstance(x, Unscaled) else plain(x)
        if isinstance(x, Unscaled) or x.shape[0] == 1:
            weight, scales = self.stored.read()
            return gemv(x, weight, self.bias, scales=scales)
        if x.shape[0] <= self.stored.few:
            weight, scales = self.stored.read()
            return skinny_gemm(x, weight, self.bias, weight_scales=scales)
        if self.bias is None:
            return torch.mm(x, self._turned)  # what `linear` comes to, with less for the host to do
        return torch.addmm(self.bias, x, self._turned)

    def gated(self, x: Input) -> Tensor:
        """Of the results, the first half, activated by silu, times the second."""
        if isinstance(x, Tensor) and self._gates and 1 < x.shape[0] <= self.stored.few:
            weight, scales = self.stored.read()
            return skinny_gemm(x, weight, self.bias, weight_scales=scales, gated=True)
        if (
            isinstance(x, Tensor)
            and self._supports_gated_gemm
            and pays(x.shape[0], self.stored.weight)
        ):
            return gated_gemm(x.contiguous(), self.stored.weight)
        # among others of a single token, whose product is faster on its own
        return silu_gated(self(x))

    def prepare_gate(self) -> None:
        """Have the kernel for many tokens compiled: there is one, whatever their number."""
        if self._supports_gated_gemm:
            gated_gemm(
                self.stored.weight.new_zeros((1, self.stored.weight.shape[1])), self.stored.weight
            )

    def joined(self, x: Tensor, hidden: Tensor, norm: Norm) -> Unscaled:
        """Of one token: the result added to `hidden` [1, out], and the sum normalised but for its
        scale.
        """
        weight, scales = self.stored.read()
        return fused_gemv(x, weight, self.bias, hidden, norm, scales)


class WideProduct:
    """Weights of the activations' own type, the result in float32: for logits, whose best must not
    tie by rounding.
    """

    takes_unscaled = True  # of one token

    def __init__(self, weight: Tensor) -> None:
        self.stored = _Stored(weight)

    def __call__(self, x: Input, out: Tensor | None = None) -> Tensor:
        whole, (weight, scales) = self.stored.weight, self.stored.read()
        values = x.values if isinstance(x, Unscaled) else plain(x)
        if out is None:
            out = values.new_empty((values.shape[0], whole.shape[0]), dtype=torch.float32)
        if values.shape[0] == 0:  # a step in the midst of a prompt: the weight need not be read
            return out
        if values.shape[0] == 1:
            return gemv(x if isinstance(x, Unscaled) else values, weight, None, out, scales)
        if values.dtype == torch.float32:
            return torch.mm(values, whole.t(), out=out)
        if values.shape[0] <= self.stored.few:
            return skinny_gemm(values, weight, None, weight_scales=scales, out=out)
        return torch.mm(values, whole.t(), out_dtype=torch.float32, out=out)


class WeightOnlyProduct:
    """Weights of int8 or e4m3 with a scale a row: read as they are for few tokens, expanded for
    many.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scales, self.bias = weight, scales.float(), bias

    def __call__(self, x: Input) -> Tensor:
        x = plain(x)
        if x.dtype != torch.float32 and x.shape[0] <= _FEW_EIGHT_BITS:
            return skinny_gemm(x, self.weight, self.bias, weight_scales=self.scales)
        # In float32, because the scales of small weights are no numbers that float16 has.
        return functional.linear(
            x, (self.weight.float() * self.scales[:, None]).to(x.dtype), self.bias
        )

    def gated(self, x: Input) -> Tensor:
        """Of the results, the first half, activated by silu, times the second."""
        x = plain(x)
        if x.dtype == torch.float32 or x.shape[0] > _FEW_EIGHT_BITS or not gates(self.weight):
            return silu_gated(self(x))
        return skinny_gemm(x, self.weight, self.bias, weight_scales=self.scales, gated=True)


class EightBitProduct:
    """Weights of e4m3 with a scale a row, activations of e4m3 with a scale a token; the result is
    bfloat16.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scales, self.bias = weight, scales.contiguous(), bias

    def __call__(self, x: Input) -> Tensor:
        values, by_token = x if isinstance(x, Quantised) else quantise(plain(x).contiguous())
        if values.shape[0] <= _FEW_EIGHT_BITS:
            return skinny_gemm(values, self.weight, self.bias, by_token, self.scales)
        return torch._scaled_mm(
            values,
            self.weight.t(),
            by_token,
            self.scales[None, :],
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
