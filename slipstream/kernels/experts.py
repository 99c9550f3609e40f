"""A mixture of experts: the routing of tokens, and the sum of the experts' outputs. On a GPU:
gpu/experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def route(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their routing weights, float32: [tokens, per_token] each.

    logits: [tokens, experts]
    """
    weights, chosen = logits.float().softmax(dim=-1).topk(per_token, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights


def route_by_sigmoid(logits: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """Return the same, with the sigmoid of the chosen experts' logits as weights."""
    best, chosen = logits.float().topk(per_token, dim=-1)
    return chosen, exact_sigmoid(best)


def route_in_groups(
    scores: Tensor, correction: Tensor | None, per_token: int, groups: int, groups_per_token: int
) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token and their scores, float32: [tokens, per_token] each.

    scores: float32 [tokens, experts]; correction: [experts], added to the scores that experts and
    groups are chosen by. A group counts by its best expert, with a correction by its two best.
    """
    ranked = scores if correction is None else scores + correction
    if groups_per_token < groups:
        by_group = ranked.unflatten(1, (groups, -1))
        best = by_group.topk(1 if correction is None else min(2, by_group.shape[2])).values.sum(-1)
        kept = best.topk(groups_per_token, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        ranked = by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    chosen = ranked.topk(per_token, dim=-1).indices
    return chosen, scores.gather(1, chosen)


def exact_sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid(x) in x's type, computed in float64.

    In float32 on a CPU the last bit depends on the number of elements, that is, on the other
    tokens of a step.
    """
    return x.double().sigmoid().to(x.dtype)


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    first: int = 0,
) -> Tensor:
    """Return the weighted sum of the experts' outputs: x [tokens, hidden] → [tokens, hidden].

    Tokens are sorted by expert, so that each expert runs once. chosen, weights: from `route`;
    first: the number of the first of `experts`. Other experts add nothing.
    """
    expert_of_pair = chosen.flatten()  # a pair is a token and one of its experts
    counts = expert_of_pair.bincount(minlength=first + len(experts)).tolist()
    begin = sum(counts[:first])
    counts = counts[first : first + len(experts)]
    order = expert_of_pair.argsort(stable=True)[begin : begin + sum(counts)]
    total = torch.zeros(x.shape, dtype=torch.float32)
    if not len(order):
        return total.to(x.dtype)
    tokens = order // chosen.shape[1]
    parts = zip(experts, x[tokens].split(counts), strict=True)
    outputs = torch.cat([expert(part) for expert, part in parts if len(part)])
    weighted = outputs.float() * weights.flatten()[order, None]
    return total.index_add_(0, tokens, weighted).to(x.dtype)


def grouped_gemm(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Return [pairs, out]: each pair's row times the weight of its expert.

    The torch reference of the kernel.

    x: [tokens, in] or [pairs, in], weight: [experts, out, in], chosen: [tokens, per_token]
    """
    rows = x.repeat_interleave(chosen.numel() // len(x), dim=0)
    return torch.bmm(weight[chosen.flatten()], rows[:, :, None])[:, :, 0]
