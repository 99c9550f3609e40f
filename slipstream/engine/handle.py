"""A launched plan of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine import pooling, sampler, scores
from slipstream.engine.plan import StepResult
from slipstream.engine.rows import Rows


class Handle:
    """A launched plan, whose tokens are already computed."""

    def __init__(
        self,
        sampled: sampler.Sampled | None,
        rows: Rows,
        prompts: Sequence[scores.PromptLogits] = (),
        pooled: Sequence[pooling.Pooled] = (),
    ) -> None:
        self._sampled = sampled
        self._rows = rows
        self._prompts = prompts
        self._pooled = pooled

    def result(self) -> StepResult:
        result = (
            StepResult(tokens=[]) if self._sampled is None else sampler.to_result(self._sampled)
        )
        result.prompt_scores = scores.to_scores(self._prompts)
        result.prompt_scores |= pooling.to_pooled_scores(self._pooled, self._rows)
        return result
