"""The sliding window of attention, and the blocks that a request may release because of it.
No torch here.

    block     0     1     2     3     4     5     6
              sinks |---- outside ----|--- inside ----|
                                              ^ position of the next token

The next token attends to itself, to the `tokens` - 1 tokens before it and to the sinks. A block
outside the window stays outside for all later tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.kernels.attention_rule import AttentionRule


@dataclass(frozen=True, slots=True)
class Window:
    tokens: int  # the widest window of all layers
    sinks: int = 0  # number of first tokens that every token attends to

    @classmethod
    def from_rules(cls, rules: Iterable[AttentionRule], longest: int) -> Window | None:
        """Return the window of a model's layers; None if a layer attends to whole sequences."""
        rules = list(rules)
        tokens = max(longest if rule.window is None else rule.window for rule in rules)
        return cls(tokens, max(rule.sinks for rule in rules)) if tokens < longest else None

    def blocks_outside(self, position: int, block_tokens: int) -> range:
        """Return the blocks that no token from `position` on attends to."""
        return range(
            -(-self.sinks // block_tokens), max(0, position - self.tokens + 1) // block_tokens
        )

    def max_blocks(self, tokens: int, block_tokens: int, limit: int) -> int:
        """Return the most blocks that a request holds while it computes `tokens` tokens.

        The result is at most `limit`, unless the window alone needs more.
        """
        # At least two tokens: one in flight and the one after it.
        needed = self._blocks_for(2, block_tokens)
        wanted = self._blocks_for(max(2, tokens), block_tokens)
        return max(needed, min(wanted, limit))

    def _blocks_for(self, tokens: int, block_tokens: int) -> int:
        sinks = -(-self.sinks // block_tokens)
        # One block more, because the window may begin within a block.
        return sinks + -(-(self.tokens + tokens) // block_tokens) + 1
