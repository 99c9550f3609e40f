"""The function between the two linear layers of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from slipstream.kernels.activation import ACTIVATIONS, clamped_gated, gated
from slipstream.kernels.operations import Operations
from slipstream.model.spec import ModelSpec


def mlp_activation(spec: ModelSpec, operations: Operations, fp8: bool) -> Callable[[Tensor], Any]:
    """Return the function between the MLP's two linear layers: [tokens, 2 * ffn], or [tokens, ffn]
    without a gate → an `Input` [tokens, ffn].
    """
    activation = ACTIVATIONS[spec.activation]
    if not spec.gated_mlp:
        return activation
    if spec.clamped_gate is not None:
        bounds = spec.clamped_gate
        return partial(clamped_gated, alpha=bounds.alpha, limit=bounds.limit)
    if spec.activation != "silu":
        return partial(gated, activation=activation)
    return operations.silu_gated_quantised if fp8 else operations.silu_gated
