"""A mixture of experts: a router chooses a few experts per token, and their outputs are mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.experts import mixture, route
from slipstream.kernels.linear import Linear
from slipstream.model.linear import Tensors
from slipstream.model.spec import ModelSpec

Activation = Callable[[Tensor], Tensor]


class Mixture:
    def __init__(self, spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> None:
        assert spec.experts is not None
        self.experts = spec.experts
        self.router = source.linear(f"{name}.router", spec.experts.count, spec.hidden_size, False)
        build = gpu_experts if source.device.type == "cuda" else cpu_experts
        self.run_experts = build(spec, source, f"{name}.experts", activate)
        self.shared: Expert | None = None
        if spec.experts.shared_ffn_size:
            size = spec.experts.shared_ffn_size
            up_proj = source.linear(f"{name}.shared.gate_up", 2 * size, spec.hidden_size, False)
            down_proj = source.linear(f"{name}.shared.proj", spec.hidden_size, size, False)
            self.shared = Expert(up_proj, activate, down_proj)
            self.shared_weight = source.linear(f"{name}.shared_share", 1, spec.hidden_size, False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] → [tokens, hidden]"""
        experts = self.experts
        chosen, weights = route(self.router(x), experts.per_token, experts.normalised)
        mixed = self.run_experts(x, chosen, weights)
        if self.shared is None:
            return mixed
        return mixed + self.shared_weight(x).sigmoid() * self.shared(x)


@dataclass(frozen=True)
class Expert:
    up_proj: Linear
    activate: Activation
    down_proj: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.up_proj(x)))


# (x [tokens, hidden], chosen experts, routing weights: [tokens, per_token] each) → [tokens, hidden]
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def cpu_experts(spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> RunExperts:
    """Return a function that runs each expert once, on the tokens that chose it."""
    assert spec.experts is not None
    count = spec.experts.count
    ffn_size = spec.experts.ffn_size
    up_projs = source.linears(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size)
    down_projs = source.linears(f"{name}.proj", count, spec.hidden_size, ffn_size)
    experts = [
        Expert(up_proj, activate, down_proj)
        for up_proj, down_proj in zip(up_projs, down_projs, strict=True)
    ]
    return lambda x, chosen, weights: mixture(x, chosen, weights, experts)


def gpu_experts(spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> RunExperts:
    """Return a function that runs all experts in grouped GEMMs."""
    # imported here: a CPU installation has no Triton
    from slipstream.kernels.gpu.experts import grouped_gemm, plan_experts

    assert spec.experts is not None
    count = spec.experts.count
    ffn_size = spec.experts.ffn_size
    gate_up = source.stacked(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size)
    proj = source.stacked(f"{name}.proj", count, spec.hidden_size, ffn_size)

    invariant = source.batch_invariant

    def run_experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        plan = plan_experts(chosen, count, fixed_tile=invariant)
        outputs = grouped_gemm(activate(grouped_gemm(x, *gate_up, plan)), *proj, plan)
        by_token = outputs.view(*chosen.shape, spec.hidden_size)  # [tokens, per_token, hidden]
        if invariant:
            return _sum_in_order(by_token, weights).to(x.dtype)
        return torch.bmm(weights.to(x.dtype)[:, None, :], by_token)[:, 0]

    return run_experts


def _sum_in_order(by_token: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs, added one after the other in float32.

    by_token: [tokens, per_token, hidden]; weights: [tokens, per_token]
    """
    total = by_token[:, 0] * weights[:, :1]
    for rank in range(1, by_token.shape[1]):
        total = total + by_token[:, rank] * weights[:, rank : rank + 1]
    return total
