"""One step's plan and its result, as plain data. No torch here.

A plan carries differences only: rows that start, blocks that tables gain, tokens that each row
computes. The state of a runner after plan k follows from plans 0..k alone. So a recorded list of
plans replays a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.engine.messages import Scores
from slipstream.engine.request import Constraint, PromptTable, Request
from slipstream.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row, with all its tokens, the blocks it already holds and its sampling."""

    row: int
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    sampling: SamplingParams
    adapter: int = 0
    pages: tuple[int, ...] = ()  # the pages that hold its adapter
    prompt_table: PromptTable | None = None


@dataclass(frozen=True, slots=True)
class RowFork:
    """A row continues from another row of its group: from that row's first `tokens` tokens, with a
    block table of its own.
    """

    row: int
    source: int
    tokens: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    Entry i: row `rows[i]` computes `counts[i]` tokens from position `positions[i]` on. `epochs[i]`
    identifies the request that owned the row when the plan was made.

    If `samples[i]`, the row has then computed all its known tokens and samples the next one. The
    last `drafts[i]` of its tokens are draft tokens: it samples after each of them too,
    1 + `drafts[i]` tokens in all.

    A runner applies a plan in this order: saves, loads, copies, starts, forks, appended blocks,
    released blocks, written tokens.
    """

    step: int
    starts: list[RowStart] = field(default_factory=list)
    forks: list[RowFork] = field(default_factory=list)
    # (block, the host slot that it is saved in)
    saves: list[tuple[int, int]] = field(default_factory=list)
    # (host slot, the block that it is loaded into)
    loads: list[tuple[int, int]] = field(default_factory=list)
    # (block, the block that becomes its copy)
    copies: list[tuple[int, int]] = field(default_factory=list)
    # (row, index of the table entry that becomes the null block)
    released: list[tuple[int, int]] = field(default_factory=list)
    # (row, position, token that the host decided on)
    written: list[tuple[int, int, int]] = field(default_factory=list)
    # the table of appended_rows[i] gains appended_blocks[i]
    appended_rows: list[int] = field(default_factory=list)
    appended_blocks: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    # (adapter, the pages that it is written to before the step)
    placed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # row → one bit for each token that it may sample; for each of its samples, if it has drafts
    masks: dict[int, bytes] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


def add_entry(
    plan: StepPlan, request: Request, count: int, draft_tokens: Sequence[int] = ()
) -> int:
    """Schedule `count` tokens of a request and draft tokens after them; return how many in all."""
    scheduled = request.scheduled
    samples = scheduled + count == len(request.tokens) + request.pending
    plan.rows.append(request.row)
    plan.epochs.append(request.epoch)
    plan.positions.append(scheduled)
    plan.counts.append(count + len(draft_tokens))
    plan.samples.append(samples)
    plan.drafts.append(len(draft_tokens))
    request.scheduled = scheduled + count + len(draft_tokens)
    request.pending += samples + len(draft_tokens)
    request.draft_tokens = draft_tokens
    if draft_tokens:
        plan.written += [
            (request.row, len(request.tokens) + i, token) for i, token in enumerate(draft_tokens)
        ]
    if request.unwritten:
        first = len(request.tokens) - request.unwritten
        plan.written += [
            (request.row, place, request.tokens[place])
            for place in range(first, len(request.tokens))
        ]
        request.unwritten = 0
    if samples and request.constraint is not None:
        mask = _masks(request, request.constraint, len(draft_tokens))
        if mask:
            plan.masks[request.row] = mask
    return count + len(draft_tokens)


def _masks(request: Request, constraint: Constraint, drafts: int) -> bytes:
    """Return the masks of a request's samples: after its last known token and each draft token."""
    output = request.tokens[request.prompt_tokens :]
    if request.decided is None or request.reviser is None or not request.decided.tokens:
        return constraint.mask(output)
    decided = request.decided.tokens
    masks = [request.reviser.only(token) for token in decided[: drafts + 1]]
    if len(masks) <= drafts:
        masks.append(constraint.mask(output + decided))
    return b"".join(masks)


def remove_request(plan: StepPlan, request: Request) -> None:
    """Remove a running request from a plan that is being built, before its row and blocks are
    released.
    """
    row = request.row
    _remove_entries(plan, row)
    plan.masks.pop(row, None)
    kept = [index for index, other in enumerate(plan.appended_rows) if other != row]
    plan.appended_rows[:] = [plan.appended_rows[index] for index in kept]
    plan.appended_blocks[:] = [plan.appended_blocks[index] for index in kept]
    own_blocks = set(request.blocks)
    plan.copies[:] = [copy for copy in plan.copies if copy[1] not in own_blocks]
    plan.starts[:] = [start for start in plan.starts if start.row != row]
    plan.forks[:] = [fork for fork in plan.forks if fork.row != row]
    plan.released[:] = [place for place in plan.released if place[0] != row]
    plan.written[:] = [write for write in plan.written if write[0] != row]


def _remove_entries(plan: StepPlan, row: int) -> None:
    entries = [entry for entry, other in enumerate(plan.rows) if other == row]
    for entry in reversed(entries):
        del plan.rows[entry]
        del plan.epochs[entry]
        del plan.positions[entry]
        del plan.counts[entry]
        del plan.samples[entry]
        del plan.drafts[entry]


class StepFailed(Exception):
    """The tokens of a plan could not be computed; the text says why. The blocks that the plan moves
    or copies were moved and copied all the same.
    """


@dataclass(slots=True)
class StepResult:
    """The results of a plan's entries."""

    # sampled tokens, entry by entry; an entry contributes 1 + its number of draft tokens
    tokens: list[int]
    log_probs: list[float] | None = None  # nan for rows that did not ask for it
    # index into tokens → the likeliest tokens and their log-probabilities
    top_log_probs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    # index into tokens → why that row has no token
    errors: dict[int, str] = field(default_factory=dict)
    # index into tokens → float32 [vocab]
    generation_logits: dict[int, bytes] = field(default_factory=dict)
    # plan entry → scores of the prompt positions that it computed
    prompt_scores: dict[int, Scores] = field(default_factory=dict)


def sampling_places(plan: StepPlan, entries: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return the row of each sampled token, and the number of tokens that precede it in that row.

    `entries`: the plan's entries, in the order of the step.
    """
    rows: list[int] = []
    lengths: list[int] = []
    for entry in entries:
        if plan.samples[entry]:
            length = plan.positions[entry] + plan.counts[entry]
            places = range(length - plan.drafts[entry], length + 1)
            rows += [plan.rows[entry]] * len(places)
            lengths += places
    return rows, lengths
