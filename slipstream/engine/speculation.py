"""Draft tokens: proposals for the tokens that come next. No torch here.

A row may compute draft tokens together with its last known token, and samples after each of them. A
sampled token follows from the tokens before it, the seed and its position alone. So a draft token
that equals the token sampled in its place gives the same text as without drafts, only sooner. A
wrong one costs the time to compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from slipstream.engine.blocks import BlockPool
from slipstream.engine.request import Request

# Length of the longest token sequence that is looked up; shorter ones are tried after it.
_LONGEST_MATCH = 3
_INDEXED_AT_ONCE = 4096  # tokens of a long prompt per step, so that no step waits for all of it


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
