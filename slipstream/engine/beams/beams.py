"""Beam search: which continuations live on, and which have ended. No torch here.

`BeamSearch` is the search alone, on numbers. `BeamGroup` ties it to the requests that compute: each
beam is a request with a row of its own. The beams of a group advance together, when the last of
them has sampled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from slipstream.engine.messages import Beam
from slipstream.engine.request import Constraint, Request, SamplingParams

Candidates = list[tuple[int, float]]  # (token, log-probability), the likeliest first


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence of tokens after the prompt."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    total: float = 0.0  # of the log-probabilities
    logits: tuple[bytes, ...] = ()  # that each token was chosen from; empty ones where nobody asked

    def then(self, token: int, log_prob: float, logits: bytes = b"") -> Path:
        return Path(
            (*self.tokens, token),
            (*self.log_probs, log_prob),
            self.total + log_prob,
            (*self.logits, logits),
        )


class Told(NamedTuple):
    """What a beam sampled."""

    candidates: Candidates
    logits: bytes


class Survivor(NamedTuple):
    parent: int  # which of the beams it continues
    token: int


class Ended(NamedTuple):
    score: float
    path: Path


class BeamSearch:
    def __init__(self, sampling: SamplingParams, constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self.beams = [Path()]
        self.ended: list[Ended] = []  # the best `beam_width`, best first
        self.finished = False

    def advance(self, candidates: list[Candidates], logits: Sequence[bytes] = ()) -> list[Survivor]:
        """One token further: what each beam may be followed by → the beams that go on, best first.

        `logits`: those that the candidates of each beam come from, where somebody wants to see
        them.
        """
        width, length = self.sampling.beam_width, len(self.beams[0].tokens) + 1
        survivors: list[Survivor] = []
        paths: list[Path] = []
        for rank, (parent, token, path) in enumerate(self._best(candidates, logits)):
            if length == self.sampling.max_tokens or self._stops(path):
                if rank < width:  # the others are here only so that enough beams go on
                    self._end(path)
            elif len(survivors) < width:
                survivors.append(Survivor(parent, token))
                paths.append(path)
        self.beams = paths
        self.finished = not paths or self._is_over(length)
        return survivors

    def results(self) -> list[Beam]:
        """The best beams there are, those that were cut short after those that ended."""
        cut = sorted(
            (Ended(self._score(p), p) for p in self.beams if p.tokens), key=lambda e: -e.score
        )
        chosen = [*self.ended, *(() if self.finished else cut)][: self.sampling.beam_width]
        return [self._beam(ended.path) for ended in chosen]

    def _best(
        self, candidates: list[Candidates], logits: Sequence[bytes]
    ) -> list[tuple[int, int, Path]]:
        """(beam, token, path) of the most promising continuations of all beams together, best
        first.
        """
        ways = [
            self._ways(place, beam, follows)
            for place, (beam, follows) in enumerate(zip(self.beams, candidates, strict=True))
        ]
        best = islice(heapq.merge(*ways, key=lambda way: -way[0]), self.sampling.candidates)
        return [
            (
                place,
                token,
                self.beams[place].then(token, log_prob, logits[place] if logits else b""),
            )
            for _, place, token, log_prob in best
        ]

    def _ways(
        self, place: int, beam: Path, follows: Candidates
    ) -> Iterator[tuple[float, int, int, float]]:
        """(score, beam, token, log-probability) of one beam's continuations, best first as they
        came.
        """
        bonus = self.sampling.diversity_rate * place
        for token, log_prob in follows:
            if math.isfinite(log_prob):
                yield beam.total + log_prob + bonus, place, token, log_prob

    def _end(self, path: Path) -> None:
        self.ended.append(Ended(self._score(path), path))
        self.ended.sort(key=lambda ended: -ended.score)
        del self.ended[self.sampling.beam_width :]

    def _stops(self, path: Path) -> bool:
        if path.tokens[-1] in self.sampling.end_ids:
            return True
        return self._constraint is not None and self._constraint.complete(list(path.tokens))

    def _score(self, path: Path) -> float:
        return path.total / len(path.tokens) ** self.sampling.length_penalty

    def _is_over(self, length: int) -> bool:
        """Whether going on is pointless, by the rule that was asked for."""
        sampling = self.sampling
        if len(self.ended) < sampling.beam_width:
            return False
        if sampling.early_stopping == 1:
            return True
        # The longest a beam can become is what a reward for length would make the best of.
        reward = sampling.early_stopping != 0 and sampling.length_penalty > 0.0
        best_length = sampling.max_tokens if reward else length
        return self.beams[0].total / best_length**sampling.length_penalty <= self.ended[-1].score

    def _beam(self, path: Path) -> Beam:
        marked = path.tokens[-1] in self.sampling.end_ids
        shown = len(path.tokens) - marked  # the end mark itself is not part of the answer
        reason = "stop" if self._stops(path) else "length"
        logits = b"".join(path.logits[:shown])
        return Beam(
            list(path.tokens[:shown]), list(path.log_probs[:shown]), path.total, reason, logits
        )


class Move(NamedTuple):
    """`target` gives up what it holds and goes on from where `source` is."""

    source: Request
    target: Request


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The requests that compute the beams of one search. members[0] is the one that clients know."""

    members: list[Request]
    search: BeamSearch
    order: list[Request] = field(default_factory=list)  # the member that computes search.beams[i]
    told: dict[int, Told] = field(default_factory=dict)  # what members sampled, by their row
    advanced: bool = False  # since the last plan, which has to be told the beams' new tokens
    moves: list[Move] = field(default_factory=list)  # decided, and not yet part of a plan
    # have a row, but no blocks before the first beam has some
    asleep: list[Request] = field(default_factory=list)

    @classmethod
    def of(cls, leader: Request) -> BeamGroup:
        members = [leader]
        for _ in range(leader.sampling.beam_width - 1):
            # A constraint goes by the tokens it is shown, so that all beams can ask the same one.
            members.append(
                Request(
                    leader.request,
                    leader.arrival,
                    list(leader.tokens),
                    constraint=leader.constraint,
                )
            )
        group = cls(members, BeamSearch(leader.sampling, leader.constraint), [leader])
        for member in members:
            member.group, member.lockstep = group, True
        return group

    @property
    def leader(self) -> Request:
        return self.members[0]

    @property
    def first(self) -> Request:
        """The member whose prompt the others share."""
        return self.order[0]

    def tell(self, member: Request, candidates: Candidates, logits: bytes = b"") -> bool:
        """Take what a member sampled; True when that was the last, and the group has advanced."""
        self.told[member.row] = Told(candidates, logits)
        if len(self.told) < len(self.order):
            return False
        told = [self.told[member.row] for member in self.order]
        survivors = self.search.advance(
            [one.candidates for one in told], [one.logits for one in told]
        )
        self.told.clear()
        if not self.search.finished:
            self._place(survivors)
            self.advanced = True
        return True

    def rest(self) -> None:
        """All rows and blocks are gone; the paths are not."""
        self.told.clear()
        self.moves.clear()
        self.asleep.clear()
        self.advanced = False

    def sleep(self) -> list[Request]:
        """The first beam starts alone; all others wait until it has the prompt's blocks."""
        others = [member for member in self.members if member is not self.first]
        for member in others:
            member.pending = 1
        self.asleep = self.order[1:]
        return others

    def _place(self, survivors: list[Survivor]) -> None:
        """Give each beam a member: the parent's own where possible, else one whose beam has ended."""
        parents = self.order
        keeping: dict[int, int] = {}
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
        for member in spare:  # fewer beams than rows: nothing else was left to choose
            member.pending = 1
        self.order = order
