"""A mixture of experts: which experts each token takes, and their answers joined. On a GPU:
gpu/experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def route(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """logits: [tokens, experts] → the chosen experts and their shares, float32: [tokens, per_token]
    each.
    """
    shares, chosen = logits.float().softmax(dim=-1).topk(per_token, dim=-1)
    return chosen, shares / shares.sum(dim=-1, keepdim=True) if normalised else shares


def mixture(
    x: Tensor, chosen: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """x: [tokens, hidden] → [tokens, hidden]. Tokens are sorted by expert, so that each expert runs
    once.
    """
    expert_of_pair = chosen.flatten()  # a pair is a token and one of its experts
    order = expert_of_pair.argsort(stable=True)
    tokens = order // chosen.shape[1]
    counts = expert_of_pair.bincount(minlength=len(experts)).tolist()
    parts = zip(experts, x[tokens].split(counts), strict=True)
    answers = torch.cat([expert(part) for expert, part in parts if len(part)])
    weighted = answers.float() * shares.flatten()[order, None]
    return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, tokens, weighted).to(x.dtype)


def grouped_gemm(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """x: [tokens, in] or [pairs, in], weight: [experts, out, in], chosen: [tokens, per_token] →
    [pairs, out].

    What the kernel of the same name computes, pair by pair.
    """
    rows = x.repeat_interleave(chosen.numel() // len(x), dim=0)
    return torch.bmm(weight[chosen.flatten()], rows[:, :, None])[:, :, 0]
