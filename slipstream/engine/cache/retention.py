"""Which cached blocks go first: those of the lowest priority, among them the least recently used.
No torch here.

A request may say how dear the blocks are that it leaves behind, and for how long. What nothing is
said of, and what was kept for its time, has the priority in the middle.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

USUAL_PRIORITY = 35
LARGEST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Keep:
    """How dear a block is once nobody holds it."""

    priority: int
    milliseconds: int | None = None  # after that it is as any other; None: for ever


@dataclass(frozen=True, slots=True)
class KeptRange:
    """Tokens of a prompt: from `first` up to `end`; None: to its end."""

    first: int
    end: int | None
    keep: Keep


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request asks for its blocks: those of the prompt by ranges, those of the answer all
    alike.
    """

    ranges: tuple[KeptRange, ...] = ()
    answer: Keep | None = None

    def of_block(self, first_token: int, prompt_tokens: int) -> Keep | None:
        """By the block's first token, as upstream has it; of several ranges, the last."""
        if first_token >= prompt_tokens:
            return self.answer
        for part in reversed(self.ranges):
            if part.first <= first_token and (part.end is None or first_token < part.end):
                return part.keep
        return None


class IdleBlocks:
    """Blocks that nobody holds and whose content has a name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # least recently used first
        self._levels: dict[int, OrderedDict[int, None]] = {USUAL_PRIORITY: OrderedDict()}
        # block → its priority, and when that ends
        self._unusual: dict[int, tuple[int, float | None]] = {}
        # a heap of (when, block), some of them out of date
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __contains__(self, block: int) -> bool:
        return block in self._unusual or block in self._levels[USUAL_PRIORITY]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._levels.values())

    def add(self, block: int, keep: Keep | None = None) -> None:
        if keep is None or keep.priority == USUAL_PRIORITY:
            self._levels[USUAL_PRIORITY][block] = None
            return
        end = None if keep.milliseconds is None else self._clock() + keep.milliseconds / 1000
        self._levels.setdefault(keep.priority, OrderedDict())[block] = None
        self._unusual[block] = keep.priority, end
        if end is not None:
            heapq.heappush(self._ends, (end, block))

    def remove(self, block: int) -> None:
        priority, _ = self._unusual.pop(block, (USUAL_PRIORITY, None))
        del self._levels[priority][block]
        if priority != USUAL_PRIORITY and not self._levels[priority]:
            del self._levels[priority]

    def pop(self) -> int:
        """The one to do without."""
        while self._ends and self._ends[0][0] <= self._clock():
            end, block = heapq.heappop(self._ends)
            if self._unusual.get(block, (0, None))[1] == end:  # otherwise it has been taken since
                self.remove(block)
                self.add(block)
        block = next(
            iter(self._levels[min(priority for priority, level in self._levels.items() if level)])
        )
        self.remove(block)
        return block
