"""A mixture of experts: a router chooses a few experts per token, and their outputs are mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.experts import (
    exact_sigmoid,
    mixture,
    route,
    route_by_sigmoid,
    route_in_groups,
)
from slipstream.kernels.linear import Linear, UnquantisedLinear
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.linear import Tensors
from slipstream.model.spec import Experts, ModelSpec

_SMALLEST_SUM = 1e-20  # of routing weights: sigmoids may all be 0
Activation = Callable[[Tensor], Tensor]


class Mixture:
    """The experts of a layer. With several ranks, each has some of the experts, or a part of each:
    the sum of the ranks' outputs is the layer's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Tensors,
        name: str,
        activate: Activation,
        ranks: Ranks = ALONE,
    ) -> None:
        assert spec.experts is not None
        self.experts = spec.experts
        self.router = _take_router(spec, spec.experts, source, f"{name}.router")
        self.correction: Tensor | None = None
        if spec.experts.corrected:
            shape = (spec.experts.count,)
            self.correction = source.take(f"{name}.router_correction.weight", shape, torch.float32)
        build = gpu_experts if source.device.type == "cuda" else cpu_experts
        held = spec.experts.held_by(ranks.rank, ranks.size)
        self.run_experts = build(spec, source, f"{name}.experts", activate, held)
        self.shared: Expert | None = None
        if spec.experts.shared_ffn_size:
            size = spec.experts.shared_ffn_size
            up_proj = source.linear(f"{name}.shared.gate_up", 2 * size, spec.hidden_size, False)
            down_proj = source.linear(f"{name}.shared.proj", spec.hidden_size, size, False)
            self.shared = Expert(up_proj, activate, down_proj)
        self.shared_weight: Linear | None = None
        if spec.experts.shared_ffn_size and spec.experts.shared_router:
            self.shared_weight = source.linear(f"{name}.shared_share", 1, spec.hidden_size, False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] → [tokens, hidden]"""
        chosen, weights = self._route(x)
        if self.experts.weighted_inputs:
            mixed = self._run_on_weighted(x, chosen, weights)
        else:
            mixed = self.run_experts(x, chosen, weights)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        if self.shared_weight is not None:
            shared = exact_sigmoid(self.shared_weight(x)) * shared
        return mixed + shared

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their routing weights: [tokens, per_token] each."""
        experts = self.experts
        logits = self.router(x.float() if experts.exact_router else x)
        if experts.groups > 1 or experts.corrected:
            scores = logits.float()
            sigmoid = experts.scoring == "sigmoid"
            scores = exact_sigmoid(scores) if sigmoid else scores.softmax(dim=-1)
            chosen, weights = route_in_groups(
                scores,
                self.correction,
                experts.per_token,
                experts.groups,
                experts.groups_per_token,
            )
            if experts.normalised:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        elif experts.scoring == "sigmoid":
            chosen, weights = route_by_sigmoid(logits, experts.per_token)
        else:
            chosen, weights = route(logits, experts.per_token, experts.normalised)
        return chosen, weights * experts.routed_scale if experts.routed_scale != 1.0 else weights

    def _run_on_weighted(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the experts' outputs for inputs that the routing weights scale: a row
        for each token and expert, so that the experts run once.
        """
        scaled = x[:, None] * weights[..., None].to(x.dtype)  # [tokens, per_token, hidden]
        pairs = scaled.flatten(0, 1)
        ones = torch.ones((len(pairs), 1), dtype=weights.dtype, device=x.device)
        outputs = self.run_experts(pairs, chosen.reshape(-1, 1), ones)
        return outputs.view(scaled.shape).sum(dim=1)


def _take_router(spec: ModelSpec, experts: Experts, source: Tensors, name: str) -> Linear:
    if not experts.exact_router:
        return source.linear(name, experts.count, spec.hidden_size, experts.biases)
    weight = source.take(f"{name}.weight", (experts.count, spec.hidden_size), torch.float32)
    bias: Tensor | None = None
    if experts.biases:
        bias = source.take(f"{name}.bias", (experts.count,), torch.float32)
    return source.in_form(UnquantisedLinear(weight, bias))


@dataclass(frozen=True)
class Expert:
    up_proj: Linear
    activate: Activation
    down_proj: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.up_proj(x)))


# (x [tokens, hidden], chosen experts, routing weights: [tokens, per_token] each) → [tokens, hidden]
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def cpu_experts(
    spec: ModelSpec, source: Tensors, name: str, activate: Activation, held: range
) -> RunExperts:
    """Return a function that runs each of the experts `held` once, on the tokens that chose it."""
    assert spec.experts is not None
    count = len(held)
    ffn_size = spec.experts.ffn_size
    biases = spec.experts.biases
    up_projs = source.linears(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size, biases)
    down_projs = source.linears(f"{name}.proj", count, spec.hidden_size, ffn_size, biases)
    experts = [
        Expert(up_proj, activate, down_proj)
        for up_proj, down_proj in zip(up_projs, down_projs, strict=True)
    ]
    return lambda x, chosen, weights: mixture(x, chosen, weights, experts, held.start)


def gpu_experts(
    spec: ModelSpec, source: Tensors, name: str, activate: Activation, held: range
) -> RunExperts:
    """Return a function that runs the experts `held` in grouped GEMMs."""
    # imported here: a CPU installation has no Triton
    from slipstream.kernels.gpu.experts import grouped_gemm, plan_experts

    assert spec.experts is not None
    count = len(held)
    partial = count < spec.experts.count
    ffn_size = spec.experts.ffn_size
    gate_up = source.stacked(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size)
    proj = source.stacked(f"{name}.proj", count, spec.hidden_size, ffn_size)

    invariant = source.batch_invariant

    def run_experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if partial:
            chosen = chosen - held.start  # no tile covers the numbers outside 0 to count - 1
        plan = plan_experts(chosen, count, fixed_tile=invariant)
        outputs = grouped_gemm(activate(grouped_gemm(x, *gate_up, plan)), *proj, plan)
        by_token = outputs.view(*chosen.shape, spec.hidden_size)  # [tokens, per_token, hidden]
        if partial:
            # rows of other ranks' experts were never written
            outside = (chosen < 0) | (chosen >= count)
            by_token = by_token.masked_fill(outside[..., None], 0.0)
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
