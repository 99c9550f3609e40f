"""The pool of KV cache blocks. No torch here.

Every block is in exactly one state:

    free    never used, or its content is not hashed
    idle    no request holds it, but its content is hashed and can be reused
    held    one or more requests hold it

A block's hash covers all tokens up to the block's end, with the adapter and the tenant's salt at
the root. So requests with equal prefixes find the same blocks. Only full blocks whose content is
written are hashed. Block 0 is the null block: it is never allocated, padding reads it, and in a
block table it stands for a released block.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Sequence

from slipstream.engine.cache.eviction import IdleBlocks, RetentionPriority
from slipstream.engine.cache.host_blocks import HostBlocks

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were requested than are available; the caller must check `available` first."""


def root_hash(adapter: int, salt: str) -> bytes:
    """Return the root of a chain of block hashes. Tenants and adapters never share a chain."""
    return hashlib.sha256(f"{adapter}\0{salt}".encode()).digest()


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of the block that holds `tokens` and follows the block with hash `parent`."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    def __init__(
        self, total_blocks: int, block_tokens: int, reuse: bool = True, host_slots: int = 0
    ) -> None:
        self.total_blocks = total_blocks  # without the null block
        self.block_tokens = block_tokens
        self.reuse = reuse
        self.host = HostBlocks(host_slots if reuse else 0)
        # A heap: the lowest number is allocated first, so that tables tend to be runs of blocks.
        self._free = list(range(1, total_blocks + 1))
        self._idle = IdleBlocks()
        # hashed blocks with a retention priority of their own
        self._retention: dict[int, RetentionPriority] = {}
        self._references = [0] * (total_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (total_blocks + 1)
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """The number of available blocks whose content can be reused."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def find_block(self, block_hash: bytes) -> int:
        """Return the block with this hash, or the null block."""
        return self._block_of.get(block_hash, NULL_BLOCK)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain. Does not hold them."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks count as available until they are held."""
        return sum(1 for block in blocks if block in self._idle)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these cached blocks."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._references[block] == 0:
                self._idle.remove(block)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, free ones first. Then idle ones are evicted: those of the lowest
        retention priority, and among them the least recently used.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks requested, {self.available} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block = self._idle.pop()
                self.host.save(block, self._remove_hash(block))
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full and written block findable by its hash."""
        if (
            not self.reuse
            or block == NULL_BLOCK
            or self._hashes[block] is not None
            or block_hash in self._block_of
        ):
            return  # also when another block holds the same content
        self._hashes[block] = block_hash
        self._block_of[block_hash] = block

    def set_retention(self, block: int, retention: RetentionPriority | None) -> None:
        """Set the retention priority of a hashed block; None leaves it as it is."""
        if retention is not None and self._hashes[block] is not None:
            self._retention[block] = retention

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block. A table's end is evicted before its beginning."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    heapq.heappush(self._free, block)
                else:
                    self._idle.add(block, self._retention.get(block))

    def discard_transfers(
        self, saves: Iterable[tuple[int, int]], loads: Iterable[tuple[int, int]]
    ) -> None:
        """Make the targets of transfers that were not carried out unfindable."""
        self.host.discard({slot for _, slot in saves})
        for _, block in loads:
            if self._hashes[block] is not None:
                self._remove_hash(block)
                if self._references[block] == 0:
                    self._idle.remove(block)
                    heapq.heappush(self._free, block)

    def _remove_hash(self, block: int) -> bytes:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hashes[block] = None
        self._retention.pop(block, None)
        return block_hash

    def check_integrity(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise if a block is lost, in two states, or held by other than the given tables."""
        self.host.check_integrity()
        self._check_references(tables)
        self._check_states()
        self._check_hashes()

    def _check_references(self, tables: Iterable[Sequence[int]]) -> None:
        held = [0] * (self.total_blocks + 1)
        for table in tables:
            for block in table:
                held[block] += block != NULL_BLOCK
        if held != self._references:
            wrong = [b for b in range(self.total_blocks + 1) if held[b] != self._references[b]]
            raise AssertionError(f"blocks {wrong[:8]}: tables and reference counts differ")

    def _check_states(self) -> None:
        free = set(self._free)
        idle = set(self._idle)
        held = {b for b in range(1, self.total_blocks + 1) if self._references[b] > 0}
        if len(idle) != len(self._idle):
            raise AssertionError("an idle block has two retention priorities")
        if len(free) != len(self._free) or free & idle or free & held or idle & held:
            raise AssertionError("a block is in two states")
        lost = self.total_blocks - len(free) - len(idle) - len(held)
        if lost:
            raise AssertionError(f"{lost} blocks are lost")
        if any(self._hashes[b] is not None for b in free):
            raise AssertionError("a free block is hashed")
        if any(self._hashes[b] is None for b in idle):
            raise AssertionError("an idle block is not hashed")

    def _check_hashes(self) -> None:
        if any(self._hashes[block] is None for block in self._retention):
            raise AssertionError("a block that is not hashed has a retention priority")
        by_block = {b: h for b, h in enumerate(self._hashes) if h is not None}
        if by_block != {b: h for h, b in self._block_of.items()}:
            raise AssertionError("hashes and blocks disagree")
