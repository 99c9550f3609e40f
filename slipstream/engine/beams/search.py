"""Beam search on plain numbers: the beams that continue, and the ended ones. No torch here."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from slipstream.engine.messages import Beam
from slipstream.engine.request import Constraint
from slipstream.engine.sampling_params import SamplingParams

Candidates = list[tuple[int, float]]  # (token, log-probability), the likeliest first


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence of tokens after the prompt."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    total: float = 0.0  # sum of the log-probabilities
    logits: tuple[bytes, ...] = ()  # logits of each token; empty unless requested

    def extend(self, token: int, log_prob: float, logits: bytes = b"") -> Path:
        return Path(
            (*self.tokens, token),
            (*self.log_probs, log_prob),
            self.total + log_prob,
            (*self.logits, logits),
        )


class Continuation(NamedTuple):
    """One way to extend a beam by a token."""

    score: float
    beam: int  # index of the beam
    token: int
    log_prob: float


class Survivor(NamedTuple):
    """A beam of the next step."""

    parent: int  # index of the beam that it extends
    token: int


class EndedPath(NamedTuple):
    score: float
    path: Path


class BeamSearch:
    def __init__(self, sampling: SamplingParams, constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self.beams = [Path()]
        self.ended: list[EndedPath] = []  # the best `beam_width`, best first
        self.finished = False

    def advance(self, candidates: list[Candidates], logits: Sequence[bytes] = ()) -> list[Survivor]:
        """Extend the beams by one token; return the beams that continue, best first.

        `candidates`: the likeliest next tokens of each beam. `logits`: the logits that they come
        from, if the request asks for them.
        """
        width = self.sampling.beam_width
        length = len(self.beams[0].tokens) + 1
        survivors: list[Survivor] = []
        paths: list[Path] = []
        for rank, continuation in enumerate(self._best(candidates)):
            parent = continuation.beam
            token = continuation.token
            path = self.beams[parent].extend(
                token, continuation.log_prob, logits[parent] if logits else b""
            )
            if length == self.sampling.max_tokens or self._stops(path):
                if rank < width:  # lower ranks only make sure that enough beams continue
                    self._end(path)
            elif len(survivors) < width:
                survivors.append(Survivor(parent, token))
                paths.append(path)
        self.beams = paths
        self.finished = not paths or self._is_over(length)
        return survivors

    def results(self) -> list[Beam]:
        """Return the best beams, ended ones first."""
        chosen = list(self.ended)
        if not self.finished:
            unfinished = [EndedPath(self._score(p), p) for p in self.beams if p.tokens]
            chosen += sorted(unfinished, key=lambda ended: -ended.score)
        return [self._beam(ended.path) for ended in chosen[: self.sampling.beam_width]]

    def _best(self, candidates: list[Candidates]) -> Iterator[Continuation]:
        """Return the most promising continuations of all beams together, best first."""
        by_beam = [
            self._continuations(index, beam, follows)
            for index, (beam, follows) in enumerate(zip(self.beams, candidates, strict=True))
        ]
        return islice(heapq.merge(*by_beam, key=lambda one: -one.score), self.sampling.candidates)

    def _continuations(self, index: int, beam: Path, follows: Candidates) -> Iterator[Continuation]:
        """Yield the continuations of one beam, best first."""
        bonus = self.sampling.diversity_rate * index
        for token, log_prob in follows:
            if math.isfinite(log_prob):
                yield Continuation(beam.total + log_prob + bonus, index, token, log_prob)

    def _end(self, path: Path) -> None:
        self.ended.append(EndedPath(self._score(path), path))
        self.ended.sort(key=lambda ended: -ended.score)
        del self.ended[self.sampling.beam_width :]

    def _stops(self, path: Path) -> bool:
        if path.tokens[-1] in self.sampling.end_ids:
            return True
        return self._constraint is not None and self._constraint.complete(list(path.tokens))

    def _score(self, path: Path) -> float:
        return path.total / self._length_factor(len(path.tokens))

    def _length_factor(self, length: int) -> float:
        return float(length**self.sampling.length_penalty)

    def _is_over(self, length: int) -> bool:
        """Return whether the search ends, by the rule in `early_stopping`."""
        sampling = self.sampling
        if len(self.ended) < sampling.beam_width:
            return False
        if sampling.early_stopping == 1:
            return True
        # If longer beams score higher, the best possible score is at the maximum length.
        rewards_length = sampling.early_stopping != 0 and sampling.length_penalty > 0.0
        best_length = sampling.max_tokens if rewards_length else length
        return self.beams[0].total / self._length_factor(best_length) <= self.ended[-1].score

    def _beam(self, path: Path) -> Beam:
        has_end_token = path.tokens[-1] in self.sampling.end_ids
        shown = len(path.tokens) - has_end_token  # the end token is not part of the output
        return Beam(
            tokens=list(path.tokens[:shown]),
            log_probs=list(path.log_probs[:shown]),
            total_log_prob=path.total,
            finish_reason="stop" if self._stops(path) else "length",
            generation_logits=b"".join(path.logits[:shown]),
        )
