"""The norms of a transformer, taken from an engine's tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.normalisation import Norm
from slipstream.model.linear import Tensors
from slipstream.model.spec import ModelSpec


def take_norm(spec: ModelSpec, source: Tensors, name: str, consumer: str = "") -> Norm:
    """Return a norm. consumer: the name of the one linear layer that takes its result; the norm
    quantises the result where that layer takes fp8.
    """
    shape = (spec.hidden_size,)
    weight = torch.ones(shape, device=source.device)
    if spec.norm_weights:
        weight = norm_weight(spec, source, f"{name}.weight", spec.hidden_size)
    bias: Tensor | None = None
    if spec.norm == "layer":
        bias = torch.zeros(shape, device=source.device)
        if spec.norm_weights and spec.norm_bias:
            bias = source.take(f"{name}.bias", shape, torch.float32)
    return Norm(weight, bias, spec.norm_epsilon, source.takes_fp8_inputs(consumer), source.dtype)


def norm_weight(spec: ModelSpec, source: Tensors, name: str, size: int) -> Tensor:
    """Return a norm's weight in float32: 16 bits would round its sum with the offset, and the
    normalised values before they are scaled.
    """
    return source.take(name, (size,), torch.float32) + spec.norm_offset


def normed_sum(hidden: Tensor, delta: Tensor, norm: Norm | None) -> Tensor:
    """Add delta to the residual stream and normalise it, in place; return it in delta's type."""
    assert norm is not None
    assert norm.bias is not None
    hidden += delta
    shape = norm.weight.shape
    normalised = functional.layer_norm(
        hidden, shape, norm.weight.float(), norm.bias.float(), norm.epsilon
    )
    hidden.copy_(normalised)
    return hidden.to(delta.dtype)
