"""What the ranks of an engine exchange in a step of compiled code. torch carries it, and no numbers
are computed here but the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.engine.cpu.step_parts import StepParts
from slipstream.engine.with_torch.arrays import as_tensor
from slipstream.kernels.ranks import Ranks
from slipstream.model.spec import ModelSpec


class SumPart:
    """Sums the outputs of a linear layer whose inputs are divided among the ranks."""

    def __init__(
        self,
        ranks: Ranks,
        delta: np.ndarray,
        hidden: np.ndarray | None,
        samples: bool,
        scale: float = 1.0,
    ) -> None:
        """delta: float32 [tokens, width], this rank's output, and then the sum; hidden: the
        residual stream, if the sum times scale is added to it; samples: the rows are the step's
        samples
        """
        self._scale = scale
        self._ranks = ranks
        self._delta = as_tensor(delta)
        self._hidden = None if hidden is None else as_tensor(hidden)
        self._samples = samples

    @torch.inference_mode()
    def __call__(self, step: StepParts) -> None:
        rows = step.samples if self._samples else step.tokens
        if not rows:
            return
        own = self._delta[:rows]
        total = self._ranks.sum(own)
        if self._hidden is not None:
            self._hidden[:rows].add_(total, alpha=self._scale)
        elif total.data_ptr() != own.data_ptr():
            own.copy_(total)


class HeadNormPart:
    """Normalises queries and keys over the heads of all ranks, with RMS norms, in place.

    All ranks have the same number of heads, so the mean of their means is that of all heads. A KV
    head that several ranks hold counts as often as every other one.
    """

    def __init__(
        self,
        ranks: Ranks,
        heads: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        epsilon: float,
    ) -> None:
        """heads: queries and keys, float32 [tokens, size] each; weights: float32 [size] each"""
        self._ranks = ranks
        self._heads = [as_tensor(part) for part in heads]
        self._weights = [as_tensor(weight) for weight in weights]
        self._epsilon = epsilon

    @torch.inference_mode()
    def __call__(self, step: StepParts) -> None:
        parts = [part[: step.tokens] for part in self._heads]
        own = torch.stack([part.square().mean(dim=1) for part in parts])
        means = self._ranks.sum(own) / self._ranks.size
        for part, mean, weight in zip(parts, means, self._weights, strict=True):
            part.mul_(torch.rsqrt(mean + self._epsilon)[:, None]).mul_(weight)


@torch.inference_mode()
def join_logits(ranks: Ranks, part: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """Return the logits of all ranks: [rows, vocab]. part: those of this one"""
    each = len(spec.vocabulary_of(0, ranks.size))
    joined: np.ndarray = ranks.join(as_tensor(part), each, spec.vocab_size).numpy()
    return joined


@torch.inference_mode()
def choose_best(
    ranks: Ranks, logits: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest of all ranks' logits and its token, by row."""
    best, chosen = ranks.best_of(as_tensor(logits), as_tensor(tokens))
    return best.numpy(), chosen.numpy()
