"""The number of prompt tokens that a step may compute beside running streams. No torch and no clock
here: the budget depends on the plans and times that it was given.

Every token of a stream waits for the whole step. `PromptSpread` spreads prompts over steps. For a
target of the time between tokens, `StepBudget` predicts the time of a step from its work by a
linear model, which is fitted to the steps so far:

    seconds = a + b * decode rows + c * their context + d * prompt tokens + e * attended pairs
"""

from __future__ import annotations

import math
from typing import NamedTuple

from slipstream.engine.plan import StepPlan

# The share of the target that a step is planned to take. The rest is for errors of the prediction.
_PLANNED_SHARE = 0.9
# Prompts advance by at least this part of the full budget, even where decoding alone takes longer
# than the target.
_MIN_PART = 32
# Prompt tokens are a multiple of this where there are more.
_MULTIPLE = 32
# A step may have this many times the prompt tokens of the largest step so far: the time of a much
# larger one cannot be predicted.
_GROWTH = 2
# The weight of an observation falls by this factor with each later one.
_FORGETTING = 0.98
# After this many steps, a step that took much longer than predicted counts as this many times the
# prediction: something else delayed it.
_FITTED_STEPS = 8
_MAX_OVER_PREDICTION = 2.0
_SWEEPS = 3  # of the fit, after each step


# Steps of fewer tokens take about as long as reading the weights does.
_MIN_STEP_TOKENS = 512
# A step has as many tokens as take this many seconds, or more. Smaller ones compute fewer prompt
# tokens per second: what a step costs once, such as reading the weights, has a larger share.
_MIN_STEP_SECONDS = 0.04
# Prompt tokens of a step for each stream in it. Where streams are many, prompts that advance slowly
# leave rows empty.
_TOKENS_PER_STREAM = 6
# Prompts that wait are spread over this many steps.
_BACKLOG_STEPS = 48
# Steps have a multiple of this many tokens: a tile of a GEMM.
_TILE_TOKENS = 128


class PromptSpread:
    """The budget of steps with running streams on a GPU.

    A step of a large model with the full budget delays its streams by a fifth of a second. Prompts
    that are spread over more steps delay them less, and take hardly longer: a step that computes
    prompts and streams reads the weights once for both.
    """

    def __init__(self, tokens_per_second: float) -> None:
        """tokens_per_second: prompt tokens that the device computes in large steps"""
        self._least = max(_MIN_STEP_TOKENS, round(_MIN_STEP_SECONDS * tokens_per_second))

    def prompt_tokens(self, streams: int, backlog: int) -> int:
        """Return how many prompt tokens to compute beside streams in a step.

        streams: tokens of the streams; backlog: prompt tokens that wait
        """
        prompts = max(_TOKENS_PER_STREAM * streams, backlog // _BACKLOG_STEPS)
        tokens = max(self._least, streams + prompts)
        return -(-tokens // _TILE_TOKENS) * _TILE_TOKENS - streams


class StepWork(NamedTuple):
    """The work of a step. The fields are the variables of the linear model."""

    steps: int  # 1
    decodes: int  # rows that compute one token
    context: int  # tokens that those rows attend to
    prompt_tokens: int  # tokens of the other rows
    pairs: int  # attended tokens of each of those, added up

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Return the work of a plan."""
        rows = len(plan.rows)
        tokens = plan.tokens
        context = sum(plan.positions) + rows
        if tokens == rows:
            return cls(1, rows, context, 0, 0)
        longer = [
            (position, count)
            for position, count in zip(plan.positions, plan.counts, strict=True)
            if count > 1
        ]
        return cls(
            steps=1,
            decodes=rows - len(longer),
            context=context - sum(position + 1 for position, _ in longer),
            prompt_tokens=tokens - rows + len(longer),
            pairs=sum(_pairs(position, count) for position, count in longer),
        )


def _pairs(position: int, count: int) -> int:
    """Return how many tokens `count` tokens from `position` on attend to, added up."""
    return count * position + count * (count + 1) // 2


class StepBudget:
    """The token budget of steps in which streams run, for a target."""

    def __init__(self, target_seconds: float, most_tokens: int) -> None:
        """most_tokens: the budget of a step without running streams"""
        self._planned_seconds = _PLANNED_SHARE * target_seconds
        self._least_tokens = max(1, most_tokens // _MIN_PART)
        self._most_tokens = most_tokens
        self._model = StepTimeModel()
        self._largest = 0  # prompt tokens of the largest step so far
        # step → its work and when it was planned
        self._planned: dict[int, tuple[StepWork, float]] = {}
        self._last_result = -math.inf  # time of the last result

    def prompt_tokens(self, decodes: StepWork, position: int) -> int:
        """Return how many prompt tokens to compute beside the streams in a step.

        decodes: the work that is already planned; position: where the prompt tokens begin.
        """
        tokens = self._largest_chunk(self._model.seconds(decodes), position)
        tokens = min(tokens, _GROWTH * self._largest, self._most_tokens)
        if tokens > _MULTIPLE:
            tokens -= tokens % _MULTIPLE
        return max(tokens, self._least_tokens)

    def _largest_chunk(self, seconds: float, position: int) -> int:
        """Return how many prompt tokens fit into the planned time beside `seconds` of other work:
        the largest n with left >= per_token * n + per_pair * pairs(position, n).
        """
        left = self._planned_seconds - seconds
        if left <= 0:
            return 0
        _, _, _, per_token, per_pair = self._model.coefficients
        linear = per_token + per_pair * (position + 0.5)
        root = math.sqrt(linear * linear + 2 * per_pair * left)
        if linear + root <= 0:
            return self._most_tokens  # no prompt has been timed
        return int(min(self._most_tokens, 2 * left / (linear + root)))

    def begin(self, plan: StepPlan, now: float) -> None:
        """Take note of a plan. `now`: when its planning began."""
        self._planned[plan.step] = (StepWork.of(plan), now)

    def abandon(self, plan: StepPlan) -> None:
        """Forget a plan that was not carried out."""
        self._planned.pop(plan.step, None)

    def end(self, plan: StepPlan, now: float) -> None:
        """Learn from the time of a step, whose result arrived at `now`.

        A step that was planned while an earlier one ran began when that one ended.
        """
        work, planned = self._planned.pop(plan.step)
        seconds = now - max(planned, self._last_result)
        self._last_result = now
        if seconds > 0:
            self._model.observe(work, seconds)
            self._largest = max(self._largest, work.prompt_tokens)


class StepTimeModel:
    """A linear model of the time of a step with coefficients of at least 0, fitted to relative
    errors of recent steps by coordinate descent on the normal equations.
    """

    def __init__(self) -> None:
        size = len(StepWork._fields)
        self.coefficients = [0.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._right = [0.0] * size
        self._observed = 0

    def seconds(self, work: StepWork) -> float:
        """Return the predicted time of a step."""
        return sum(
            coefficient * amount
            for coefficient, amount in zip(self.coefficients, work, strict=True)
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Fit the model to one more step."""
        predicted = self.seconds(work)
        self._observed += 1
        if self._observed > _FITTED_STEPS and predicted > 0:
            seconds = min(seconds, _MAX_OVER_PREDICTION * predicted)
        relative = [amount / seconds for amount in work]
        for row, right in enumerate(relative):
            line = self._gram[row]
            for column, left in enumerate(relative):
                line[column] = _FORGETTING * line[column] + right * left
            self._right[row] = _FORGETTING * self._right[row] + right
        for _ in range(_SWEEPS):
            self._sweep()

    def _sweep(self) -> None:
        """Set each coefficient to its best value for the others. One without observations keeps its
        value.
        """
        for row, line in enumerate(self._gram):
            own = line[row]
            if own < 1e-9:
                continue
            others = sum(
                coefficient * value
                for coefficient, value in zip(self.coefficients, line, strict=True)
            )
            rest = self._right[row] - others + own * self.coefficients[row]
            self.coefficients[row] = max(0.0, rest / own)


class PromptLimits:
    """The limits on the prompt tokens of a step: all of these, some or none."""

    def __init__(
        self,
        target: StepBudget | None = None,
        spread: PromptSpread | None = None,
        most_scored: int | None = None,
    ) -> None:
        """target, spread: limit prompts beside running streams; most_scored: most prompt tokens of
        a step that have scores, which need memory for all logits of each of them
        """
        self._target = target
        self.spread = spread
        self.most_scored = most_scored
        self._scored = 0  # in the step that is planned

    def begin_plan(self) -> None:
        self._scored = 0

    def scored_tokens(self, count: int) -> int:
        """Return how many of `count` prompt tokens with scores the step may still have."""
        return count if self.most_scored is None else min(count, self.most_scored - self._scored)

    def add_scored(self, count: int) -> None:
        """Take note of prompt tokens with scores in the step."""
        self._scored += count

    def prompt_tokens(self, plan: StepPlan, position: int, backlog: int, budget: int) -> int:
        """Return how many prompt tokens to compute beside the streams of a plan.

        position: where the first of them begins; backlog: prompt tokens that wait; budget: what is
        left of the step
        """
        if self.spread is not None:
            budget = min(budget, self.spread.prompt_tokens(plan.tokens, backlog))
        if self._target is not None:
            budget = min(budget, self._target.prompt_tokens(StepWork.of(plan), position))
        return budget

    def begin(self, plan: StepPlan, now: float) -> None:
        """Take note of a plan. `now`: when its planning began."""
        if self._target is not None:
            self._target.begin(plan, now)

    def end(self, plan: StepPlan, now: float) -> None:
        """Take note of a result, which arrived at `now`."""
        if self._target is not None:
            self._target.end(plan, now)

    def abandon(self, plan: StepPlan) -> None:
        """Forget a plan that was not carried out."""
        if self._target is not None:
            self._target.abandon(plan)
