"""How far back attention looks, and what a request may let go of for that. No torch here.

block     0     1     2     3     4     5     6
          sinks |---- passed ----|--- in sight ----|
                                        ^ position of the next token: it sees itself, the tokens - 1 before it
                                          and the sinks; what is passed stays unseen for all that follow it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.kernels.attention_rule import AttentionRule


@dataclass(frozen=True, slots=True)
class Window:
    tokens: int  # the widest of all layers
    sinks: int = 0  # the first tokens of a sequence, which stay in sight

    @classmethod
    def of(cls, rules: Iterable[AttentionRule], longest: int) -> Window | None:
        """None where a layer looks back at everything that there can be."""
        rules = list(rules)
        tokens = max(longest if rule.window is None else rule.window for rule in rules)
        return cls(tokens, max(rule.sinks for rule in rules)) if tokens < longest else None

    def passed(self, position: int, block_tokens: int) -> range:
        """The blocks that no token from `position` on looks at."""
        return range(
            -(-self.sinks // block_tokens), max(0, position - self.tokens + 1) // block_tokens
        )

    def most_blocks(self, at_once: int, block_tokens: int, limit: int) -> int:
        """What a request holds while `at_once` tokens are being computed: no more than `limit`, if
        it can do at all.
        """
        sinks = -(-self.sinks // block_tokens)
        # Two tokens: one on its way, and the one after it. One block more, for where the window
        # begins within one.
        least, wanted = (
            sinks + -(-(self.tokens + tokens) // block_tokens) + 1
            for tokens in (2, max(2, at_once))
        )
        return max(least, min(wanted, limit))
