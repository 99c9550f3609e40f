"""A launched plan on a GPU, and its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine import pooling, scores
from slipstream.engine.gpu.scores import to_host
from slipstream.engine.messages import Scores
from slipstream.engine.plan import StepResult
from slipstream.engine.rows import Rows
from slipstream.engine.sampler import Sampled, to_result


class GpuHandle:
    """A launched plan. Its tokens travel to the host while the next plan is made."""

    def __init__(
        self,
        sampled: Sampled | None,
        rows: Rows,
        prompts: Sequence[scores.PromptLogits] = (),
        pooled: Sequence[pooling.Pooled] = (),
    ) -> None:
        self._rows = rows
        self._sampled = sampled
        self._prompts = prompts
        self._pooled = pooled
        if sampled is not None:
            self._tokens = _to_host(sampled.tokens)
            self._best = _to_host(sampled.best)
            self._log_probs = None if sampled.log_probs is None else _to_host(sampled.log_probs)
            self._top = [
                (index, _to_host(tokens), _to_host(values)) for index, tokens, values in sampled.top
            ]
            self._likeliest = sampled.likeliest
            if self._likeliest is not None:
                self._likeliest = self._likeliest._replace(top=_to_host(self._likeliest.top))
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._sampled is None:
            return StepResult(tokens=[], prompt_scores=self._prompt_scores())
        self._event.synchronize()
        moved = self._sampled._replace(
            tokens=self._tokens,
            best=self._best,
            log_probs=self._log_probs,
            top=self._top,
            raw=[(index, logits.cpu().numpy()) for index, logits in self._sampled.raw],
        )
        result = to_result(moved)
        if self._likeliest is not None:
            result.top_log_probs |= self._likeliest.to_lists()
        result.prompt_scores = self._prompt_scores()
        return result

    def _prompt_scores(self) -> dict[int, Scores]:
        found = scores.to_scores(to_host(self._prompts))
        return found | pooling.to_pooled_scores(self._pooled, self._rows)


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
