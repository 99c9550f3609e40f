"""The order in which cached blocks are evicted: lowest retention priority first, then least
recently used. No torch here.

A request may set the priority of the blocks that it leaves in the cache, and for how long. Other
blocks, and blocks whose time is over, have the default priority.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

DEFAULT_PRIORITY = 35
LARGEST_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class RetentionPriority:
    """The priority of a block while no request holds it."""

    priority: int
    milliseconds: int | None = None  # afterwards it has the default priority; None: no end


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """The priority of prompt tokens from `first` up to `end`; None: to the end of the prompt."""

    first: int
    end: int | None
    retention: RetentionPriority


@dataclass(frozen=True, slots=True)
class Retention:
    """The priorities that a request sets: by ranges for its prompt, one for its output."""

    ranges: tuple[RetentionRange, ...] = ()
    answer: RetentionPriority | None = None

    def find_priority(self, first_token: int, prompt_tokens: int) -> RetentionPriority | None:
        """Return the priority of the block that begins with this token.

        As in TensorRT-LLM, the first token of a block decides, and the last matching range wins.
        """
        if first_token >= prompt_tokens:
            return self.answer
        for part in reversed(self.ranges):
            if part.first <= first_token and (part.end is None or first_token < part.end):
                return part.retention
        return None


class IdleBlocks:
    """Blocks that no request holds and whose content is hashed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # priority → blocks, least recently used first
        self._levels: dict[int, OrderedDict[int, None]] = {DEFAULT_PRIORITY: OrderedDict()}
        # block → its priority, if it is not the default, and when that ends
        self._prioritised: dict[int, tuple[int, float | None]] = {}
        # a heap of (end, block); entries may be out of date
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __contains__(self, block: int) -> bool:
        return block in self._prioritised or block in self._levels[DEFAULT_PRIORITY]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._levels.values())

    def add(self, block: int, retention: RetentionPriority | None = None) -> None:
        if retention is None or retention.priority == DEFAULT_PRIORITY:
            self._levels[DEFAULT_PRIORITY][block] = None
            return
        end = None
        if retention.milliseconds is not None:
            end = self._clock() + retention.milliseconds / 1000
            heapq.heappush(self._ends, (end, block))
        self._levels.setdefault(retention.priority, OrderedDict())[block] = None
        self._prioritised[block] = (retention.priority, end)

    def remove(self, block: int) -> None:
        priority, _ = self._prioritised.pop(block, (DEFAULT_PRIORITY, None))
        del self._levels[priority][block]
        if priority != DEFAULT_PRIORITY and not self._levels[priority]:
            del self._levels[priority]

    def pop(self) -> int:
        """Remove and return the block to evict next."""
        while self._ends and self._ends[0][0] <= self._clock():
            end, block = heapq.heappop(self._ends)
            # Otherwise the block has been taken since.
            if self._prioritised.get(block, (0, None))[1] == end:
                self.remove(block)
                self.add(block)
        lowest = min(priority for priority, level in self._levels.items() if level)
        block = next(iter(self._levels[lowest]))
        self.remove(block)
        return block
