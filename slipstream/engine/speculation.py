"""Guesses at what comes next. No torch here.

A row may compute tokens that nobody has sampled yet. It samples after each of them, and since a
token follows from the tokens before it, the seed and its position alone, a guess that equals the
token drawn in its place leads to the very same text as without guessing, only sooner. A wrong guess
costs what it took to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from slipstream.engine.blocks import BlockPool
from slipstream.engine.request import Request

# tokens that must agree before the continuation is trusted; shorter ones are tried after
_LONGEST_MATCH = 3
_READ_AT_ONCE = 4096  # tokens of a long prompt, so that no step waits for all of it to be looked at


class Drafter:
    """Guesses of one request: those it was given, then what followed the last time its end was
    written.
    """

    def __init__(self, given: Sequence[int] = (), lookup_tokens: int = 0) -> None:
        self._given = list(given)
        self._lookup_tokens = lookup_tokens
        # tokens → what follows
        self._seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST_MATCH)]
        self._read = 0  # tokens of the request that `_seen` knows
        # guesses offered at once: fewer after wrong ones, more after right ones
        self._reach = lookup_tokens
        # tokens that must agree: all of them where guessing has not paid of late
        self._shortest = 1

    def propose(self, tokens: list[int], prompt_tokens: int, most: int) -> list[int]:
        """At most `most` guesses at what follows these tokens."""
        answered = len(tokens) - prompt_tokens
        if answered < len(self._given):
            right = self._given[:answered] == tokens[prompt_tokens:]
            return self._given[answered : answered + most] if right else self._look_up(tokens, most)
        return self._look_up(tokens, most)

    def learn(self, offered: int, right: int) -> None:
        """So many of the last guesses were right."""
        if right == offered:
            self._reach, self._shortest = min(2 * offered, self._lookup_tokens), 1
        else:
            self._reach = min(right + 1, self._lookup_tokens)
            self._shortest = 1 if right else _LONGEST_MATCH

    def _look_up(self, tokens: list[int], most: int) -> list[int]:
        count = min(most, self._reach)
        if count <= 0:
            return []
        self._read_on(tokens)
        for length in range(_LONGEST_MATCH, self._shortest - 1, -1):
            place = (
                self._seen[length - 1].get(tuple(tokens[-length:]))
                if length <= len(tokens)
                else None
            )
            if place is not None:
                return tokens[place : place + count]
        return []

    def _read_on(self, tokens: list[int]) -> None:
        """Remember what follows each run of tokens, the latest place first; the end itself has
        nothing after it.
        """
        last = min(len(tokens), self._read + _READ_AT_ONCE)
        for end in range(max(self._read, 1), last):
            for length, seen in enumerate(self._seen, 1):
                if length <= end:
                    seen[tuple(tokens[end - length : end])] = end
        self._read = last


def guesses_of(request: Request, count: int, budget: int, blocks: BlockPool) -> list[int]:
    """As many as the budget, the request's limit and the blocks allow, where all it knows is being
    computed.
    """
    assert request.drafter is not None
    if request.computed + count < request.known:
        return []
    # nobody gives way to guesses
    room = (len(request.blocks) + blocks.available) * blocks.block_tokens
    most = min(budget, request.limit - 1 - request.known, room - request.known)
    guesses = (
        request.drafter.propose(request.tokens, request.prompt_tokens, most) if most > 0 else []
    )
    table = request.request.prompt_table
    if table is None:
        return guesses
    # What was looked up in the prompt may be a row of its table, which the model cannot say.
    return list(takewhile(lambda token: token < table.first_token, guesses))


def accepted(drawn: Sequence[int], guesses: Sequence[int]) -> int:
    """How many of the tokens drawn after the known ones and after each guess are tokens of the
    answer.
    """
    count = 1
    for token, guess in zip(drawn, guesses, strict=False):
        if token != guess:
            break
        count += 1
    return count
