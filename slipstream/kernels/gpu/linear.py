"""Linear layers on the GPU: own kernels for few tokens and for the fused gate, the vendor's
libraries for the other GEMMs.

12-bit copies of 16-bit weights take 7 to 17% off a step of up to 32 tokens. Switch:
`KernelOptions.compressed_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.bf12 import Bf12Weight, pack
from slipstream.kernels.gpu.activation import silu_gated
from slipstream.kernels.gpu.gated_gemm import gated_gemm, is_faster, supports_gated_gemm
from slipstream.kernels.gpu.gemv import fused_gemv, gemv
from slipstream.kernels.gpu.invariant_gemm import invariant_gemm
from slipstream.kernels.gpu.quantised import quantise
from slipstream.kernels.gpu.skinny_gemm import skinny_gemm, supports_bf12, supports_gate
from slipstream.kernels.inputs import Input, Quantised, Unscaled, plain
from slipstream.kernels.linear import Linear
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.torch_private import fp8_linear

# Tokens up to which the skinny GEMM is faster than the library, by the weight it reads.
_SKINNY_TOKENS = 32
_SKINNY_TOKENS_SMALL_WEIGHT = 64
_SKINNY_TOKENS_8_BIT = 64
# elements of a weight that is read in less time than the library takes to start
_SMALL_WEIGHT = 2**23
# columns up to which a CTA reads too little to hide the unpacking of 12-bit weights
_FEW_COLUMNS = 1024
# tokens up to which cuBLASLt beats cuBLAS, by 1 to 4% on an H200; with thousands it is slower
_CUBLASLT_TOKENS = 192


@contextmanager
def fastest_blas_library(tokens: int) -> Iterator[None]:
    """Use the BLAS library that is fastest for this many tokens while the context lasts.

    For steps that are captured: the choice holds for the whole process, and making it takes time.
    """
    before = torch.backends.cuda.preferred_blas_library()
    library = "cublaslt" if tokens <= _CUBLASLT_TOKENS else "cublas"
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class StoredWeight:
    """A weight of the activations' type, and its 12-bit copy for few tokens once it is made."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in]"""
        self.weight = weight
        self.skinny_tokens = _skinny_tokens(weight)  # tokens up to which own kernels are used
        self._copy: Bf12Weight | None = None

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy's words, without its few scales; 0 if a copy would be no faster."""
        large = self.weight.numel() > _SMALL_WEIGHT and self.weight.shape[1] > _FEW_COLUMNS
        return self.weight.numel() * 3 // 2 if large and supports_bf12(self.weight) else 0

    def compress(self) -> int:
        """Make the copy and return its bytes; 0 if it would lose accuracy."""
        self._copy = pack(self.weight) if self.copy_bytes else None
        return self.copy_bytes if self._copy is not None else 0

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight that up to `skinny_tokens` tokens read, and its scales if it has 12
        bits.
        """
        return (self.weight, None) if self._copy is None else self._copy


def _skinny_tokens(weight: Tensor) -> int:
    if weight.dtype == torch.float32:
        return 1
    return _SKINNY_TOKENS_SMALL_WEIGHT if weight.numel() <= _SMALL_WEIGHT else _SKINNY_TOKENS


class GpuLinear(Linear):
    """A weight of the activations' type."""

    accepts_unscaled = True  # a single row
    fuses_gate = True
    fuses_residual_norm = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out] or None"""
        self.stored: StoredWeight = StoredWeight(weight)
        self.bias = bias
        self._transposed = weight.t()
        self._skinny_gate = supports_gate(weight)
        self._gated_gemm = bias is None and supports_gated_gemm(weight)

    def __call__(self, x: Input) -> Tensor:
        x = x if isinstance(x, Unscaled) else plain(x)
        if isinstance(x, Unscaled) or x.shape[0] == 1:
            weight, scales = self.stored.read()
            return gemv(x, weight, self.bias, scales=scales)
        if x.shape[0] <= self.stored.skinny_tokens:
            weight, scales = self.stored.read()
            return skinny_gemm(x, weight, self.bias, weight_scales=scales)
        if self.bias is None:
            return torch.mm(x, self._transposed)  # as `functional.linear`, with less host work
        return torch.addmm(self.bias, x, self._transposed)

    def gated(self, x: Input) -> Tensor:
        """Return silu(first half of the outputs) × second half: [tokens, out / 2]."""
        stored = self.stored
        if isinstance(x, Tensor) and self._skinny_gate and 1 < x.shape[0] <= stored.skinny_tokens:
            weight, scales = stored.read()
            return skinny_gemm(x, weight, self.bias, weight_scales=scales, gated=True)
        if isinstance(x, Tensor) and self._gated_gemm and is_faster(x.shape[0], stored.weight):
            return gated_gemm(x.contiguous(), stored.weight)
        # A single token comes here, too: its GEMV is faster without the gate.
        return silu_gated(self(x))

    def prepare_gate(self) -> None:
        """Compile the gated GEMM: one kernel serves every number of tokens."""
        weight = self.stored.weight
        if self._gated_gemm:
            gated_gemm(weight.new_zeros((1, weight.shape[1])), weight)

    def residual_norm(self, x: Tensor, hidden: Tensor, norm: Norm) -> Unscaled:
        weight, scales = self.stored.read()
        return fused_gemv(x, weight, self.bias, hidden, norm, scales)

    def batch_invariant(self) -> Linear:
        return InvariantLinear(self.stored.weight, None, self.bias)


class Fp32OutputLinear(Linear):
    """A weight of the activations' type with float32 output, for logits: rounding to 16 bits would
    make the best ones tie.
    """

    accepts_unscaled = True  # a single row

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in]"""
        self.stored: StoredWeight = StoredWeight(weight)

    def __call__(self, x: Input, out: Tensor | None = None) -> Tensor:
        """out: float32 [tokens, out], which receives the result"""
        whole = self.stored.weight
        weight, scales = self.stored.read()
        values = x.values if isinstance(x, Unscaled) else plain(x)
        tokens = values.shape[0]
        if out is None:
            out = values.new_empty((tokens, whole.shape[0]), dtype=torch.float32)
        if tokens == 0:  # a step inside a prompt samples nothing: do not read the weight
            return out
        if tokens == 1:
            return gemv(x if isinstance(x, Unscaled) else values, weight, None, out, scales)
        if values.dtype == torch.float32:
            return torch.mm(values, whole.t(), out=out)
        if tokens <= self.stored.skinny_tokens:
            return skinny_gemm(values, weight, None, weight_scales=scales, out=out)
        return torch.mm(values, whole.t(), out_dtype=torch.float32, out=out)

    def batch_invariant(self) -> InvariantFp32OutputLinear:
        return InvariantFp32OutputLinear(self.stored.weight)


class WeightOnlyLinear(Linear):
    """An int8 or e4m3 weight with one scale per row: read as it is for few tokens, expanded for
    more.
    """

    fuses_gate = True

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; scales: [out]; bias: [out] or None"""
        self.weight = weight
        self.scales = scales.float()
        self.bias = bias

    def __call__(self, x: Input) -> Tensor:
        x = plain(x)
        if x.dtype != torch.float32 and x.shape[0] <= _SKINNY_TOKENS_8_BIT:
            return skinny_gemm(x, self.weight, self.bias, weight_scales=self.scales)
        # Expanded in float32: the scales of small weights are below float16's range.
        expanded = (self.weight.float() * self.scales[:, None]).to(x.dtype)
        return functional.linear(x, expanded, self.bias)

    def gated(self, x: Input) -> Tensor:
        """Return silu(first half of the outputs) × second half: [tokens, out / 2]."""
        x = plain(x)
        skinny = x.dtype != torch.float32 and x.shape[0] <= _SKINNY_TOKENS_8_BIT
        if not skinny or not supports_gate(self.weight):
            return silu_gated(self(x))
        return skinny_gemm(x, self.weight, self.bias, weight_scales=self.scales, gated=True)

    def batch_invariant(self) -> Linear:
        return InvariantLinear(self.weight, self.scales, self.bias)


class Fp8Linear(Linear):
    """An e4m3 weight with one scale per row, e4m3 activations with one scale per token; the output
    is bfloat16.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; scales: [out]; bias: [out] or None"""
        self.weight = weight
        self.scales = scales.contiguous()
        self.bias = bias

    def __call__(self, x: Input) -> Tensor:
        values, by_token = x if isinstance(x, Quantised) else quantise(plain(x).contiguous())
        if values.shape[0] <= _SKINNY_TOKENS_8_BIT:
            return skinny_gemm(values, self.weight, self.bias, by_token, self.scales)
        return fp8_linear(values, self.weight, by_token, self.scales, self.bias)

    def batch_invariant(self) -> Linear:
        return InvariantFp8Linear(self.weight, self.scales, self.bias)


class InvariantLinear(Linear):
    """A weight of any type whose results for a token do not depend on the other tokens."""

    def __init__(self, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        """weight: [out, in]; scales: [out] of an 8-bit weight; bias: [out] or None"""
        self.weight = weight
        self.scales = scales
        self.bias = bias

    def __call__(self, x: Input) -> Tensor:
        return invariant_gemm(plain(x), self.weight, self.scales, self.bias)


class InvariantFp8Linear(InvariantLinear):
    """An e4m3 weight and e4m3 activations; the output is bfloat16."""

    def __call__(self, x: Input) -> Tensor:
        values, by_token = x if isinstance(x, Quantised) else quantise(plain(x).contiguous())
        return invariant_gemm(values, self.weight, self.scales, self.bias, by_token)


class InvariantFp32OutputLinear(Linear):
    """`Fp32OutputLinear` in a batch-invariant form."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in]"""
        self.weight = weight

    def __call__(self, x: Input, out: Tensor | None = None) -> Tensor:
        values = plain(x)
        if out is None:
            shape = (values.shape[0], self.weight.shape[0])
            out = values.new_empty(shape, dtype=torch.float32)
        return invariant_gemm(values, self.weight, None, None, out=out)
