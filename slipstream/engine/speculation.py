"""Draft tokens: proposals for the tokens that come next. No torch here.

A row may compute draft tokens together with its last known token, and samples after each of them. A
sampled token follows from the tokens before it, the seed and its position alone. So a draft token
that equals the token sampled in its place gives the same text as without drafts, only sooner. A
wrong one costs the time to compute it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from slipstream.engine.blocks import BlockPool
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import Request

# Length of the longest token sequence that is looked up; shorter ones are tried after it.
_LONGEST_MATCH = 3
_INDEXED_AT_ONCE = 4096  # tokens of a long prompt per step, so that no step waits for all of it

# Adaptive lookup counts time in steps of one token.
_ADAPTIVE_MATCH = 4  # tokens that must agree
_MOST_DRAFTS = 7
_FIRST_DRAFTS = 4  # after rejected ones, and at first
# Rejected draft tokens may take this share of the output's steps, and this much before any output.
_RISKED_SHARE = 0.01
_RISKED_FIRST = 0.8
_MOST_SAVED = 2.0  # steps saved before that may be risked
# output tokens without draft tokens after rejected ones: twice as many each time
_FIRST_WAIT = 4
_LONGEST_WAIT = 64
# A step with draft tokens takes this much more time, before it is measured: most of it once, as a
# step of several tokens takes other paths than a step of one.
_STEP_COST = 0.3
_TOKEN_COST = 0.1
_MOST_COST = 1.0  # for each draft token; more is measured where something else delays a step
_MEASURED_STEPS = 9  # recent steps of one token
_LEAST_STEPS = 3
_WEIGHT = 0.2  # of the latest measurement


class DraftProposer:
    """Proposes draft tokens for one request: first the given ones, then what followed the last time
    the end of its text occurred (prompt lookup).
    """

    def __init__(self, given: Sequence[int] = (), lookup_tokens: int = 0) -> None:
        self._given = list(given)
        self._lookup_tokens = lookup_tokens
        # by length - 1: token sequence → position after its last occurrence
        self._positions: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST_MATCH)]
        self._indexed = 0  # tokens of the request that `_positions` covers
        # draft tokens proposed at once: fewer after rejected ones, more after accepted ones
        self._draft_limit = lookup_tokens
        # shortest sequence to look up: the longest only, where recent drafts were rejected
        self._shortest_match = 1

    def propose(self, tokens: list[int], prompt_tokens: int, most: int) -> list[int]:
        """Return at most `most` draft tokens to follow these tokens."""
        output_tokens = len(tokens) - prompt_tokens
        if output_tokens < len(self._given):
            matches = self._given[:output_tokens] == tokens[prompt_tokens:]
            if matches:
                return self._given[output_tokens : output_tokens + most]
        return self._look_up(tokens, most)

    def learn(self, proposed: int, accepted: int) -> None:
        """Adapt the number of draft tokens to how many of the last ones were accepted."""
        if accepted == proposed:
            self._draft_limit = min(2 * proposed, self._lookup_tokens)
            self._shortest_match = 1
        else:
            self._draft_limit = min(accepted + 1, self._lookup_tokens)
            self._shortest_match = 1 if accepted else _LONGEST_MATCH

    def _look_up(self, tokens: list[int], most: int) -> list[int]:
        count = min(most, self._draft_limit)
        if count <= 0:
            return []
        self._index(tokens)
        for length in range(_LONGEST_MATCH, self._shortest_match - 1, -1):
            if length > len(tokens):
                continue
            position = self._positions[length - 1].get(tuple(tokens[-length:]))
            if position is not None:
                return tokens[position : position + count]
        return []

    def _index(self, tokens: list[int]) -> None:
        """Record the position after each token sequence. A later occurrence replaces an earlier
        one. The end of the text is left out, because no token follows it.
        """
        last = min(len(tokens), self._indexed + _INDEXED_AT_ONCE)
        for end in range(max(self._indexed, 1), last):
            for length, positions in enumerate(self._positions, 1):
                if length <= end:
                    positions[tuple(tokens[end - length : end])] = end
        self._indexed = last


class DraftCosts:
    """The cost of draft tokens in steps of a single stream, measured beside such steps without
    draft tokens.
    """

    def __init__(self) -> None:
        self.scale = 1.0  # of what is assumed
        self._single_seconds: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._began = (-1, 0.0)  # (step, when its planning began)

    def of(self, drafts: int) -> float:
        """Return what a step with draft tokens takes more, in steps of one token."""
        return self.scale * (_STEP_COST + _TOKEN_COST * drafts)

    def begin(self, plan: StepPlan, now: float) -> None:
        """Take note of a plan. `now`: when its planning began."""
        if len(plan.rows) == 1 and plan.samples[0] and plan.counts[0] == 1 + plan.drafts[0]:
            self._began = (plan.step, now)

    def end(self, plan: StepPlan, now: float) -> None:
        """Learn from the time of a step, whose result arrived at `now`."""
        step, began = self._began
        if plan.step != step or now <= began:
            return
        drafts = plan.drafts[0]
        if not drafts:
            self._single_seconds.append(now - began)
        elif len(self._single_seconds) >= _LEAST_STEPS:
            cost = (now - began) / median(self._single_seconds) - 1.0
            cost = min(_MOST_COST * drafts, max(0.0, cost))
            self.scale += _WEIGHT * (cost / (_STEP_COST + _TOKEN_COST * drafts) - self.scale)


class AdaptiveLookup:
    """Proposes draft tokens by prompt lookup for a stream that runs alone, where they can save
    time. Rejected ones never cost more than a small share of the output's time.
    """

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        # token sequence → position after its last occurrence
        self._positions: dict[tuple[int, ...], int] = {}
        self._indexed = _ADAPTIVE_MATCH  # tokens of the request that `_positions` covers
        self._saved = 0.0  # steps that draft tokens have saved, less those that they took
        self._limit = _FIRST_DRAFTS
        self._wait = 0  # output tokens without draft tokens after the next rejected ones
        self._resume = 0  # tokens of the request from which on draft tokens are proposed
        self._known = 0  # tokens at the last proposal

    def propose(self, tokens: list[int], prompt_tokens: int, most: int) -> list[int]:
        """Return at most `most` draft tokens to follow these tokens."""
        known = len(tokens)
        if known < self._resume:
            return []
        risked = _RISKED_FIRST + _RISKED_SHARE * (known - prompt_tokens) + self._saved
        count = min(most, self._limit)
        if count <= 0 or self._costs.of(count) > risked:
            return []
        self._index(tokens)
        position = self._positions.get(tuple(tokens[-_ADAPTIVE_MATCH:]))
        if position is None:
            return []
        self._known = known
        found = tokens[position : position + count]
        while len(found) < count:  # the end of the text repeats itself
            found.append(found[position - known])
        return found

    def learn(self, proposed: int, accepted: int) -> None:
        """Adapt to how many of the last draft tokens were accepted."""
        saved = self._saved + accepted - self._costs.of(proposed)
        self._saved = min(_MOST_SAVED, saved)
        if accepted:
            self._wait = 0
            full = accepted == proposed
            self._limit = min(_MOST_DRAFTS, 2 * proposed if full else 1 + accepted)
        else:
            self._wait = min(_LONGEST_WAIT, 2 * self._wait or _FIRST_WAIT)
            self._resume = self._known + 1 + self._wait
            self._limit = _FIRST_DRAFTS

    def _index(self, tokens: list[int]) -> None:
        """Record the position after each token sequence but the last one."""
        last = min(len(tokens), self._indexed + _INDEXED_AT_ONCE)
        for end in range(self._indexed, last):
            self._positions[tuple(tokens[end - _ADAPTIVE_MATCH : end])] = end
        self._indexed = max(self._indexed, last)


class Speculation:
    """Decides which requests of an engine have draft tokens."""

    def __init__(self, lookup_tokens: int = 0, adaptive: bool = False) -> None:
        """lookup_tokens: draft tokens per step by prompt lookup for every request

        adaptive: without those, draft tokens for streams that run alone
        """
        self._lookup_tokens = lookup_tokens
        self._costs = DraftCosts() if adaptive and not lookup_tokens else None

    def add(self, request: Request) -> None:
        """Give a request a proposer, if it may have draft tokens."""
        sampling = request.sampling
        if request.constraint is not None or sampling.scores_prompt or sampling.pooling:
            return
        if request.submitted.draft or self._lookup_tokens:
            request.proposer = DraftProposer(request.submitted.draft, self._lookup_tokens)
            request.needs_host_result = True
        elif self._costs is not None:
            request.proposer = AdaptiveLookup(self._costs)

    def begin(self, plan: StepPlan, now: float) -> None:
        """Take note of a plan. `now`: when its planning began."""
        if self._costs is not None:
            self._costs.begin(plan, now)

    def end(self, plan: StepPlan, now: float) -> None:
        """Take note of a result, which arrived at `now`."""
        if self._costs is not None:
            self._costs.end(plan, now)


def drafts_now(request: Request, running: int) -> bool:
    """Return whether a request may have draft tokens in a step.

    running: requests that run
    """
    if isinstance(request.proposer, AdaptiveLookup):
        return running == 1 and not request.pending and request.deficit == 1
    return request.proposer is not None


def propose_draft_tokens(request: Request, count: int, budget: int, blocks: BlockPool) -> list[int]:
    """Return draft tokens for a request that schedules `count` tokens, as far as budget, limit and
    blocks allow. None unless all its known tokens are then scheduled.
    """
    assert request.proposer is not None
    if request.scheduled + count < request.known:
        return []
    # No request is preempted for draft tokens.
    room = (len(request.blocks) + blocks.available) * blocks.block_tokens
    most = min(budget, request.limit - 1 - request.known, room - request.known)
    if most <= 0:
        return []
    draft_tokens = request.proposer.propose(request.tokens, request.prompt_tokens, most)
    table = request.submitted.prompt_table
    if table is None:
        return draft_tokens
    # Prompt lookup may find tokens of the prompt table, which the model cannot sample.
    return list(takewhile(lambda token: token < table.first_token, draft_tokens))


def count_accepted(sampled: Sequence[int], draft_tokens: Sequence[int]) -> int:
    """Return how many of the sampled tokens are part of the output: the first one, and each one
    after an accepted draft token.
    """
    count = 1
    for token, draft in zip(sampled, draft_tokens, strict=False):
        if token != draft:
            break
        count += 1
    return count
