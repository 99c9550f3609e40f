"""The rows and blocks of beams: what a group decided becomes part of a plan. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.engine.beams.beams import BeamGroup
from slipstream.engine.holdings import Holdings
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import Request

MakeRoom = Callable[[StepPlan, Request, int], bool]


def bring_up(plan: StepPlan, group: BeamGroup, holdings: Holdings, make_room: MakeRoom) -> None:
    """Carry out what the group decided when it last advanced, and wake those that the first beam
    has blocks for.

    `make_room` frees blocks for a request, if need be by taking others'; False when it has had to
    give way itself.
    """
    size = holdings.blocks.block_tokens
    full = group.leader.prompt_tokens // size * size
    if group.asleep and group.first.settled >= full:
        for member in group.asleep:
            holdings.fork(plan, group.first, member, full)
            member.pending = 0
        group.asleep.clear()
    if not group.advanced:
        return
    tokens = len(group.first.tokens) - 1
    if tokens % size:
        # the others have a block to give up
        new = sum(not move.target.blocks for move in group.moves)
        if not make_room(plan, group.first, new):
            return
    for source, target in group.moves:
        holdings.fork(plan, source, target, tokens)
    plan.written += [(member.row, tokens, member.tokens[-1]) for member in group.order]
    group.moves.clear()
    group.advanced = False
