"""Linear layers: the base class, and the CPU's layers with unquantised, int8 and int4 weights.

On a CPU a decode step is bound by reading the weights. So bf16 weights are laid out once the way
oneDNN reads them, and int8 and int4 weights go through torch's weight-only kernels. Those kernels
are made for few tokens. For more tokens, expanding the weights before a plain GEMM is faster.

`linear_dispatch.py` chooses the class for a weight; the GPU's layers are in `gpu/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.inputs import Input
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.torch_private import (
    int4_linear,
    int8_linear,
    pack_int4_weight,
    pack_linear_weight,
    packed_linear,
)

# Above this many tokens expanding quantised weights beats the weight-only kernels
# (benchmarks/kernels.py).
_EXPAND_ABOVE_TOKENS = 48
_INT4_ROWS = 16  # the int4 kernel takes weights whose rows are a multiple of this
# Tokens of a call of a batch-invariant layer. More tokens waste time if few requests run, fewer
# waste time on prompts.
_FIXED_TOKENS = 16

# (activations, residual stream) → the normalised sum: see `fuse_residual_norm`
FusedLinear = Callable[[Any, Tensor], Input]


class CompressibleWeight(Protocol):
    """A 16-bit weight that a GPU can also keep as a 12-bit copy."""

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy; 0 if there would be none."""
        ...

    def compress(self) -> int:
        """Make the copy and return its bytes; 0 if it would lose accuracy."""
        ...


class Linear:
    """A linear layer with a stored weight: x [tokens, in] → [tokens, out].

    The class attributes say which fused forms a layer has. The defaults say none.
    """

    accepts_unscaled = False  # x may be an `Unscaled` row
    fuses_gate = False  # `gated` is implemented
    fuses_residual_norm = False  # `residual_norm` is implemented
    stored: CompressibleWeight | None = None  # None: the weight has no compressed form

    def __call__(self, x: Any) -> Tensor:
        """x: an `Input`; on a CPU a plain tensor."""
        raise NotImplementedError

    def gated(self, x: Any) -> Tensor:
        """Return silu(first half of the outputs) × second half: [tokens, out / 2]."""
        raise NotImplementedError

    def prepare_gate(self) -> None:
        """Compile the fused gate kernel for token counts that warm-up may not reach."""

    def residual_norm(self, x: Tensor, hidden: Tensor, norm: Norm) -> Input:
        """Add the output for the one token x [1, in] to `hidden` [1, out] in place, and return
        the normalised sum.
        """
        raise NotImplementedError

    def batch_invariant(self) -> Linear:
        """Return a layer with this weight whose result for a token does not depend on the other
        tokens of a call.
        """
        return FixedTokensLinear(self)


class FixedTokensLinear(Linear):
    """Runs another layer with a fixed number of tokens at a time: a matrix library chooses its
    kernel by the shape of a call, and kernels add in different orders.
    """

    def __init__(self, inner: Linear) -> None:
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        return in_fixed_batches(self._inner, x)


def in_fixed_batches(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return compute(x), called with `_FIXED_TOKENS` tokens at a time. x: [tokens, in]"""
    tokens = x.shape[0]
    padding = -tokens % _FIXED_TOKENS
    padded = functional.pad(x, (0, 0, 0, padding)) if padding else x
    parts = [compute(part) for part in padded.split(_FIXED_TOKENS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:tokens]


class UnquantisedLinear(Linear):
    """A weight of the activations' type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out] or None"""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class OneDnnLinear(Linear):
    """A bf16 weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out] or None"""
        self.packed = pack_linear_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        on_cpu = weight.device.type == "cpu"
        return on_cpu and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()


class Int8Linear(Linear):
    """An int8 weight with one scale per row."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """weight: int8 [out, in], scales: [out]; a row stands for weight × its scale"""
        self.weight = weight.contiguous()
        self.scales = scales.to(dtype)
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > _EXPAND_ABOVE_TOKENS or not _has_weight_only_kernel(x):
            return functional.linear(
                x, self.weight.to(self.dtype) * self.scales[:, None], self.bias
            )
        y = int8_linear(x, self.weight, self.scales)
        return y if self.bias is None else y.add_(self.bias)


class ExpandedInt4Linear(Linear):
    """An int4 weight that is expanded for every GEMM: any device, any number of rows."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """weight, scales: as `expand_int4` takes them"""
        self.weight = weight
        self.scales = scales
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, expand_int4(self.weight, self.scales, self.dtype), self.bias)

    def batch_invariant(self) -> Linear:
        return InvariantInt4Linear(self.weight, self.scales, self.bias, self.dtype)


class InvariantInt4Linear(ExpandedInt4Linear):
    """An int4 weight that is expanded once for all tokens of a call, in a batch-invariant form."""

    def __call__(self, x: Tensor) -> Tensor:
        expanded = expand_int4(self.weight, self.scales, self.dtype)
        return in_fixed_batches(partial(functional.linear, weight=expanded, bias=self.bias), x)


class Int4Linear(ExpandedInt4Linear):
    """An int4 weight that a few tokens read through torch's weight-only kernel."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(weight, scales, bias, dtype)
        self.group = weight.shape[1] * 2 // scales.shape[1]
        self.packed = pack_int4_weight(unpack_int4(weight).int())
        # the kernel takes the groups as the outermost dimension
        self.pairs = scales.transpose(0, 1).to(dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > _EXPAND_ABOVE_TOKENS or not _has_weight_only_kernel(x):
            return super().__call__(x)
        y = int4_linear(x, self.packed, self.group, self.pairs)
        return y if self.bias is None else y.add_(self.bias)

    def batch_invariant(self) -> Linear:
        return FixedTokensLinear(self)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[0] % _INT4_ROWS == 0


def fuse_residual_norm(linear: Linear, norm: Norm | None, consumer: Linear) -> FusedLinear | None:
    """Return one kernel that runs the linear layer on a single token, adds the result to the
    residual stream and normalises the sum for `consumer`; None if there is no such kernel.
    """
    if norm is None or not (linear.fuses_residual_norm and consumer.accepts_unscaled):
        return None
    # Unscaled values may exceed the range of float16, and fp8 needs the scale first.
    if norm.bias is not None or norm.quantise or norm.result != torch.bfloat16:
        return None
    return partial(linear.residual_norm, norm=norm)


def compress_weights(linears: Iterable[Linear], most_bytes: int) -> int:
    """Make 12-bit copies of the 16-bit weights, for steps of few tokens, if all copies fit into
    `most_bytes`. Return the bytes that they take.
    """
    weights = [linear.stored for linear in linears if linear.stored is not None]
    if sum(weight.copy_bytes for weight in weights) > most_bytes:
        return 0
    return sum(weight.compress() for weight in weights)


def unpack_int4(weight: Tensor) -> Tensor:
    """uint8 [out, in / 2] → uint8 [out, in] with values 0..15."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)


def expand_int4(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights that the int4 values stand for: [out, in].

    weight: uint8 [out, in / 2], element 2j in the low four bits; scales: [out, in / group, (scale,
    offset)]. An element is (value - 8) × the scale of its group + the offset of its group.
    """
    values = unpack_int4(weight).to(dtype).sub_(8).unflatten(1, (scales.shape[1], -1))
    return torch.addcmul(scales[..., 1:].to(dtype), values, scales[..., :1].to(dtype)).flatten(1)


def _has_weight_only_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16
