"""What the ranks of an engine exchange in a step of compiled code. torch carries it, and no numbers
are computed here but the sums.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine.cpu.step_parts import StepParts
from slipstream.engine.with_torch.arrays import as_tensor
from slipstream.kernels.ranks import Ranks
from slipstream.model.spec import ModelSpec


class SumPart:
    """Sums the outputs of a linear layer whose inputs are divided among the ranks."""

    def __init__(
        self, ranks: Ranks, delta: np.ndarray, hidden: np.ndarray | None, samples: bool
    ) -> None:
        """delta: float32 [tokens, width], this rank's output, and then the sum; hidden: the
        residual stream, if the sum is added to it; samples: the rows are the step's samples
        """
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
            self._hidden[:rows] += total
        elif total.data_ptr() != own.data_ptr():
            own.copy_(total)


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
