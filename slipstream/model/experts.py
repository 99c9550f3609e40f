"""A feed-forward part of many experts: a router chooses a few for each token, and their answers are
mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels import linear
from slipstream.kernels.experts import mixture, route
from slipstream.model.linear import Tensors
from slipstream.model.spec import ModelSpec

Activation = Callable[[Tensor], Tensor]


class Mixture:
    def __init__(self, spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> None:
        assert spec.experts is not None
        self.experts = spec.experts
        self.router = source.product(f"{name}.router", spec.experts.count, spec.hidden_size, False)
        build = _on_gpu if source.device.type == "cuda" else _on_cpu
        self.answer = build(spec, source, f"{name}.experts", activate)
        self.shared: Expert | None = None
        if spec.experts.shared_ffn_size:
            size = spec.experts.shared_ffn_size
            first = source.product(f"{name}.shared.gate_up", 2 * size, spec.hidden_size, False)
            proj = source.product(f"{name}.shared.proj", spec.hidden_size, size, False)
            self.shared = Expert(first, activate, proj)
            self.shared_share = source.product(f"{name}.shared_share", 1, spec.hidden_size, False)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] → [tokens, hidden]"""
        chosen = self.answer(
            x, *route(self.router(x), self.experts.per_token, self.experts.normalised)
        )
        return (
            chosen
            if self.shared is None
            else chosen + self.shared_share(x).sigmoid() * self.shared(x)
        )


@dataclass(frozen=True)
class Expert:
    first: linear.Product
    activate: Activation
    proj: linear.Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.proj(self.activate(self.first(x)))


Answer = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, chosen, shares


def _on_cpu(spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> Answer:
    assert spec.experts is not None
    count, ffn_size = spec.experts.count, spec.experts.ffn_size
    firsts = source.products(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size)
    projs = source.products(f"{name}.proj", count, spec.hidden_size, ffn_size)
    experts = [Expert(first, activate, proj) for first, proj in zip(firsts, projs, strict=True)]
    return lambda x, chosen, shares: mixture(x, chosen, shares, experts)


def _on_gpu(spec: ModelSpec, source: Tensors, name: str, activate: Activation) -> Answer:
    from slipstream.kernels.gpu.experts import grouped_product, plan_experts  # needs Triton

    assert spec.experts is not None
    count, ffn_size = spec.experts.count, spec.experts.ffn_size
    gate_up = source.stacked(f"{name}.gate_up", count, 2 * ffn_size, spec.hidden_size)
    proj = source.stacked(f"{name}.proj", count, spec.hidden_size, ffn_size)

    def answer(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        plan = plan_experts(chosen, count)
        answers = grouped_product(activate(grouped_product(x, *gate_up, plan)), *proj, plan)
        by_token = answers.view(*chosen.shape, spec.hidden_size)  # [tokens, per_token, hidden]
        return torch.bmm(shares.to(x.dtype)[:, None, :], by_token)[:, 0]

    return answer
