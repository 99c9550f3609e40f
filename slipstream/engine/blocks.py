"""Who holds which block of the KV cache. No torch here.

    every block is in exactly one place:      free        never used, or its content is worthless
                                              idle        nobody holds it, but its content has a name
                                              held        one or more requests read it

A block's name is the hash of all tokens up to its end (with the adapter and the tenant's salt at
the root), so equal prefixes meet in the same blocks. Only full blocks whose content is written get
a name. Block 0 is the null block: padding reads it, nobody is given it. In a table it stands for a
block that was let go.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Sequence

from slipstream.engine.cache.host_blocks import HostBlocks
from slipstream.engine.cache.retention import IdleBlocks, Keep

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than can be handed out; the caller must check `available` first."""


def root_name(adapter: int, salt: str) -> bytes:
    """Where a chain of block names begins; two tenants or adapters never share a chain."""
    return hashlib.sha256(f"{adapter}\0{salt}".encode()).digest()


def next_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block that holds `tokens` after everything that `parent` names."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    def __init__(
        self, total_blocks: int, block_tokens: int, reuse: bool = True, host_slots: int = 0
    ) -> None:
        self.total_blocks = total_blocks  # the null block not counted
        self.block_tokens = block_tokens
        self.reuse = reuse
        self.host = HostBlocks(host_slots if reuse else 0)
        # A heap: the lowest number is handed out first, so that tables tend to be runs of blocks.
        self._free = list(range(1, total_blocks + 1))
        self._idle = IdleBlocks()
        # of named blocks that somebody wants to be dearer or cheaper than others
        self._keeps: dict[int, Keep] = {}
        self._references = [0] * (total_blocks + 1)
        self._names: list[bytes | None] = [None] * (total_blocks + 1)
        self._blocks: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """How many blocks can be handed out now."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """How many of them hold content that a later request may reuse."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def block_of(self, name: bytes) -> int:
        """The block of this name, or the null block."""
        return self._blocks.get(name, NULL_BLOCK)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of names. Nothing is taken."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these taking would remove from `available`."""
        return sum(1 for block in blocks if block in self._idle)

    def take(self, blocks: Iterable[int]) -> None:
        """Hold found blocks: once more for those already held."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._references[block] == 0:
                self._idle.remove(block)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks of no content, forgetting names if need be: those that nobody
        wants kept, and among them the least recently used, first.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block = self._idle.pop()
                self.host.save(block, self._forget(block))
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def name(self, block: int, name: bytes) -> None:
        """The block is full and written: from now on others may find it under this name."""
        if (
            not self.reuse
            or block == NULL_BLOCK
            or self._names[block] is not None
            or name in self._blocks
        ):
            return  # another block holds the same content already: this one stays nameless
        self._names[block] = name
        self._blocks[name] = block

    def keep(self, block: int, keep: Keep | None) -> None:
        """From now on, and as long as it has its name, the block is as dear as this says; None: as
        it was.
        """
        if keep is not None and self._names[block] is not None:
            self._keeps[block] = keep

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. A table is released whole: its tail becomes the first to be
        forgotten.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._names[block] is None:
                    heapq.heappush(self._free, block)
                else:
                    self._idle.add(block, self._keeps.get(block))

    def never_moved(
        self, saves: Iterable[tuple[int, int]], loads: Iterable[tuple[int, int]]
    ) -> None:
        """What a plan was to bring to the host and back was not carried out: nobody may find it."""
        self.host.lose({slot for _, slot in saves})
        for _, block in loads:
            if self._names[block] is not None:
                self._forget(block)
                if self._references[block] == 0:
                    self._idle.remove(block)
                    heapq.heappush(self._free, block)

    def _forget(self, block: int) -> bytes:
        name = self._names[block]
        assert name is not None
        del self._blocks[name]
        self._names[block] = None
        self._keeps.pop(block, None)
        return name

    def check_integrity(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise if a block is lost, in two places, or held by other than the given tables."""
        self.host.check_integrity()
        held = [0] * (self.total_blocks + 1)
        for table in tables:
            for block in table:
                held[block] += block != NULL_BLOCK
        if held != self._references:
            wrong = [b for b in range(self.total_blocks + 1) if held[b] != self._references[b]]
            raise AssertionError(f"blocks {wrong[:8]}: tables and reference counts differ")
        free, idle = set(self._free), set(self._idle)
        if len(idle) != len(self._idle) or not all(
            self._names[block] is not None for block in self._keeps
        ):
            raise AssertionError("an idle block has two priorities, or one without a name has one")
        holders = {b for b in range(1, self.total_blocks + 1) if self._references[b] > 0}
        if len(free) != len(self._free) or free & idle or free & holders or idle & holders:
            raise AssertionError("a block is in two places")
        if len(free) + len(idle) + len(holders) != self.total_blocks:
            raise AssertionError(
                f"{self.total_blocks - len(free) - len(idle) - len(holders)} blocks are lost"
            )
        if any(self._names[b] is not None for b in free) or any(
            self._names[b] is None for b in idle
        ):
            raise AssertionError("a free block has a name, or an idle one has none")
        if {b: n for b, n in enumerate(self._names) if n is not None} != {
            b: n for n, b in self._blocks.items()
        }:
            raise AssertionError("names and blocks disagree")
