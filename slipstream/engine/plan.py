"""One step's orders and its answer, as plain data. No torch here.

A plan carries differences only: rows that start, blocks that tables gain, tokens each row computes. What
a rank holds after plan k follows from plans 0..k alone, so a recorded list of plans replays a run, and
tensor parallelism is sending every rank the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: all its known tokens, the blocks it holds already, and how it samples."""

    row: int
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    sampling: SamplingParams
    adapter: int = 0


@dataclass(slots=True)
class StepPlan:
    """Row rows[i] (in its generations[i]-th use) computes counts[i] tokens from position positions[i] on.

    Where samples[i], the row then has all its known tokens computed and samples the next one.
    """

    step: int
    starts: list[RowStart] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)  # table of appended_rows[i] gains appended_blocks[i]
    appended_blocks: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class StepResult:
    """What the sampling rows of a plan drew, in the plan's order of those rows."""

    tokens: list[int]
    log_probs: list[float] | None = None  # nan for rows that did not ask
    top_log_probs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # index into tokens → top n
    errors: dict[int, str] = field(default_factory=dict)  # index into tokens → why that row has no token
