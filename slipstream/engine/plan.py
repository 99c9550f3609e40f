"""One step's orders and its answer, as plain data. No torch here.

A plan carries differences only: rows that start, blocks that tables gain, tokens each row computes.
What a rank holds after plan k follows from plans 0..k alone, so a recorded list of plans replays a
run, and tensor parallelism is sending every rank the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.messages import Scores
from slipstream.engine.request import PromptTable, SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: all its known tokens, the blocks it holds already, and how it samples."""

    row: int
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    sampling: SamplingParams
    adapter: int = 0
    pages: tuple[int, ...] = ()  # where its adapter lies
    prompt_table: PromptTable | None = None


@dataclass(frozen=True, slots=True)
class RowFork:
    """A row goes on from another one of its group: that row's first `tokens` tokens, and a table of
    its own.
    """

    row: int
    source: int
    tokens: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """Row rows[i] (in its generations[i]-th use) computes counts[i] tokens from position
    positions[i] on.

    Where samples[i], the row then has all its known tokens computed and samples the next one. The
    last drafts[i] of its tokens are guesses: it samples after each of them too, 1 + drafts[i]
    tokens in all.

    The order in which a rank takes a plan over: saves, loads, copies, starts, forks, appended
    blocks, passed blocks, written tokens.
    """

    step: int
    starts: list[RowStart] = field(default_factory=list)
    forks: list[RowFork] = field(default_factory=list)
    # (block, the host's slot that keeps it)
    saves: list[tuple[int, int]] = field(default_factory=list)
    # (the host's slot, the block that gets it)
    loads: list[tuple[int, int]] = field(default_factory=list)
    # (block, the block that becomes its copy)
    copies: list[tuple[int, int]] = field(default_factory=list)
    # (row, place in its table that has no block any more)
    passed: list[tuple[int, int]] = field(default_factory=list)
    # (row, position, token) the host decided on
    written: list[tuple[int, int, int]] = field(default_factory=list)
    # table of appended_rows[i] gains appended_blocks[i]
    appended_rows: list[int] = field(default_factory=list)
    appended_blocks: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    # (adapter, pages to write it to first)
    placed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # row → a bit for each token that it may sample
    masks: dict[int, bytes] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class StepFailed(Exception):
    """A plan's tokens could not be computed: the text says why. Blocks that it moves or copies
    were, all the same.
    """


@dataclass(slots=True)
class StepResult:
    """What the sampling rows of a plan drew, in the plan's order of those rows: 1 + drafts tokens
    of each.
    """

    tokens: list[int]
    log_probs: list[float] | None = None  # nan for rows that did not ask
    # index into tokens → top n
    top_log_probs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    # index into tokens → why that row has no token
    errors: dict[int, str] = field(default_factory=dict)
    # index into tokens → float32 [vocab]
    generation_logits: dict[int, bytes] = field(default_factory=dict)
    # index into the plan's rows → of what it computed
    prompt_scores: dict[int, Scores] = field(default_factory=dict)
