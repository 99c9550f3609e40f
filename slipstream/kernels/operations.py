"""The hot operations of a transformer layer, by device: torch on a CPU, Triton kernels on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels import activation, normalisation, rotary
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.inputs import Input, quantise


class Attention(Protocol):
    """The attention of a step, planned once and used by every layer.

    queries: from `rotate_write`
    """

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule
    ) -> Tensor: ...


@dataclass(frozen=True)
class Operations:
    add_norm: Callable[[Tensor, Tensor | None, normalisation.Norm], Input]
    normalise: Callable[[Tensor, normalisation.Norm], Tensor]
    rope_at: Callable[[Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    # returns queries on a CPU; queries, keys and values in one tensor on a GPU
    rotate_write: Callable[..., Tensor]
    silu_gated: Callable[[Tensor], Tensor]
    silu_gated_quantised: Callable[[Tensor], Input]


def operations_on(device: torch.device) -> Operations:
    """Return the operations in the form that the device runs."""
    if device.type == "cuda":
        # imported here: a CPU installation has no Triton
        from slipstream.kernels.gpu import activation as gpu_activation
        from slipstream.kernels.gpu import normalisation as gpu_normalisation
        from slipstream.kernels.gpu import rotary as gpu_rotary

        return Operations(
            gpu_normalisation.add_norm,
            gpu_normalisation.normalise,
            gpu_rotary.rope_at,
            gpu_rotary.rotate_write,
            gpu_activation.silu_gated,
            gpu_activation.silu_gated_quantised,
        )
    return Operations(
        normalisation.add_norm,
        normalisation.normalise,
        rotary.rope_at,
        rotary.rotate_write,
        activation.silu_gated,
        lambda x: quantise(activation.silu_gated(x)),
    )
