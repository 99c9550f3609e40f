"""What a plan says of one request: a column of its own, and whatever else concerns its row. No
torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.engine.plan import StepPlan
from slipstream.engine.request import Request


def add_column(plan: StepPlan, request: Request, count: int, guesses: Sequence[int] = ()) -> int:
    """The request computes `count` tokens, and guesses beyond them; returns how many that are."""
    computed = request.computed
    samples = computed + count == len(request.tokens) + request.pending
    plan.rows.append(request.row)
    plan.generations.append(request.generation)
    plan.positions.append(computed)
    plan.counts.append(count + len(guesses))
    plan.samples.append(samples)
    plan.drafts.append(len(guesses))
    request.computed = computed + count + len(guesses)
    request.pending += samples + len(guesses)
    request.guesses = guesses
    if guesses:
        plan.written += [
            (request.row, len(request.tokens) + i, token) for i, token in enumerate(guesses)
        ]
    if samples and request.constraint is not None:
        mask = request.constraint.mask(request.tokens[request.prompt_tokens :])
        if mask:
            plan.masks[request.row] = mask
    return count + len(guesses)


def strike(plan: StepPlan, request: Request) -> None:
    """Take a running request out of a plan that is being made; its row and blocks are about to be
    given back.
    """
    row = request.row
    for column in (index for index, other in reversed(list(enumerate(plan.rows))) if other == row):
        for values in (
            plan.rows,
            plan.generations,
            plan.positions,
            plan.counts,
            plan.samples,
            plan.drafts,
        ):
            del values[column]  # type: ignore[attr-defined]
    plan.masks.pop(row, None)
    kept = [
        (r, b) for r, b in zip(plan.appended_rows, plan.appended_blocks, strict=True) if r != row
    ]
    plan.appended_rows[:], plan.appended_blocks[:] = [r for r, _ in kept], [b for _, b in kept]
    mine = set(request.blocks)
    plan.copies[:] = [copy for copy in plan.copies if copy[1] not in mine]
    plan.starts[:] = [start for start in plan.starts if start.row != row]
    plan.forks[:] = [fork for fork in plan.forks if fork.row != row]
    plan.passed[:] = [place for place in plan.passed if place[0] != row]
    plan.written[:] = [write for write in plan.written if write[0] != row]
