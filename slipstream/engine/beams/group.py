"""The requests that compute one beam search: each beam is a request with a row of its own. No torch
here.

The beams of a group advance together, when the last of them has sampled. What the group decides
becomes part of the next plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.engine.beams.search import BeamSearch, Candidates, Survivor
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import Request
from slipstream.engine.row_block_manager import RowBlockManager


class BeamSample(NamedTuple):
    """The tokens that one beam sampled."""

    candidates: Candidates
    logits: bytes


class Move(NamedTuple):
    """`target` releases what it holds and continues from `source`."""

    source: Request
    target: Request


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The requests of one beam search. members[0] is the leader, which clients know."""

    members: list[Request]
    search: BeamSearch
    order: list[Request] = field(default_factory=list)  # order[i] computes search.beams[i]
    samples: dict[int, BeamSample] = field(default_factory=dict)  # by row, of the current token
    advanced: bool = False  # the beams have new tokens that no plan has written to the rows yet
    moves: list[Move] = field(default_factory=list)  # decided, and not yet part of a plan
    # members with a row that have no blocks until the first beam has computed the prompt
    idle: list[Request] = field(default_factory=list)

    @classmethod
    def create(cls, leader: Request) -> BeamGroup:
        """Make a request the leader of a group of `beam_width` members."""
        members = [leader]
        for _ in range(leader.sampling.beam_width - 1):
            # A constraint depends on the tokens it is given, so all beams can share one.
            members.append(
                Request(
                    leader.submitted,
                    leader.arrival,
                    list(leader.tokens),
                    constraint=leader.constraint,
                )
            )
        group = cls(members, BeamSearch(leader.sampling, leader.constraint), [leader])
        for member in members:
            member.group = group
            member.needs_host_result = True
        return group

    @property
    def leader(self) -> Request:
        return self.members[0]

    @property
    def first(self) -> Request:
        """The member whose prompt the others share."""
        return self.order[0]

    def add_sample(self, member: Request, candidates: Candidates, logits: bytes = b"") -> bool:
        """Add what a member sampled; return True when it was the last, and the group advanced."""
        self.samples[member.row] = BeamSample(candidates, logits)
        if len(self.samples) < len(self.order):
            return False
        samples = [self.samples[member.row] for member in self.order]
        survivors = self.search.advance(
            [sample.candidates for sample in samples], [sample.logits for sample in samples]
        )
        self.samples.clear()
        if not self.search.finished:
            self._assign(survivors)
            self.advanced = True
        return True

    def reset(self) -> None:
        """Forget rows and blocks after a preemption. The beams' tokens stay."""
        self.samples.clear()
        self.moves.clear()
        self.idle.clear()
        self.advanced = False

    def start_first(self) -> list[Request]:
        """Start the first beam alone; return the others, which wait until it has computed the
        prompt.
        """
        others = [member for member in self.members if member is not self.first]
        for member in others:
            member.pending = 1
        self.idle = self.order[1:]
        return others

    def _assign(self, survivors: list[Survivor]) -> None:
        """Assign a member to each beam: its parent's if possible, else one whose beam has ended."""
        parents = self.order
        keeping: dict[int, int] = {}  # parent → the beam that keeps its member
        for beam, survivor in enumerate(survivors):
            keeping.setdefault(survivor.parent, beam)
        kept = {id(parents[parent]) for parent in keeping}
        spare = [member for member in self.members if id(member) not in kept]
        histories = [parent.tokens for parent in parents]
        order = []
        for beam, (parent, token) in enumerate(survivors):
            member = parents[parent]
            if keeping[parent] != beam:
                member = spare.pop()
                self.moves.append(Move(parents[parent], member))
            member.tokens = [*histories[parent], token]
            member.pending = 0
            order.append(member)
        for member in spare:  # there are fewer beams than members
            member.pending = 1
        self.order = order


MakeRoom = Callable[[StepPlan, Request, int], bool]


def apply_decisions(
    plan: StepPlan, group: BeamGroup, manager: RowBlockManager, make_room: MakeRoom
) -> None:
    """Add the group's last decisions to a plan, and start the idle members if the first beam has
    computed the prompt.

    `make_room` frees blocks for a request, if need be by preemption; it returns False when that
    preempted the request itself.
    """
    size = manager.blocks.block_tokens
    full = group.leader.prompt_tokens // size * size
    if group.idle and group.first.committed >= full:
        for member in group.idle:
            manager.fork(plan, group.first, member, full)
            member.pending = 0
        group.idle.clear()
    if not group.advanced:
        return
    tokens = len(group.first.tokens) - 1
    if tokens % size:
        # Targets that hold blocks release one for the one they need.
        new = sum(not move.target.blocks for move in group.moves)
        if not make_room(plan, group.first, new):
            return
    for source, target in group.moves:
        manager.fork(plan, source, target, tokens)
    plan.written += [(member.row, tokens, member.tokens[-1]) for member in group.order]
    group.moves.clear()
    group.advanced = False
