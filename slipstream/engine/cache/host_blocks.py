"""The blocks in the host's memory that were evicted from the device. No torch here.

A slot holds the content of one full block under its hash. The least recently used slot is reused
first, except for slots that the plan being built reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostBlocks:
    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        # block hash → slot, least recently used first
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots))
        self._read: set[int] = set()  # slots that the plan being built reads
        self._saves: dict[int, int] = {}  # slot → the block to be saved in it

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return the longest prefix of a chain of block hashes that is in a slot."""
        found = []
        for block_hash in hashes:
            if block_hash not in self._slot_of:
                break
            found.append(block_hash)
        return found

    def save(self, block: int, block_hash: bytes) -> None:
        """Save an evicted block, if there is a slot for it."""
        if not self.slots or block_hash in self._slot_of:
            return
        if not self._free:
            oldest = next(
                (known for known, slot in self._slot_of.items() if slot not in self._read), None
            )
            if oldest is None:
                return
            self._free.append(self._slot_of.pop(oldest))
        slot = self._free.pop()
        self._slot_of[block_hash] = slot
        self._saves[slot] = block

    def read(self, block_hash: bytes) -> int:
        """Return the slot of a hash. The slot is not reused before the plan is complete."""
        self._slot_of.move_to_end(block_hash)
        slot = self._slot_of[block_hash]
        self._read.add(slot)
        return slot

    def take_saves(self) -> list[tuple[int, int]]:
        """Return (block, slot) of every save of the plan, which is now complete."""
        saves = [(block, slot) for slot, block in self._saves.items()]
        self._saves.clear()
        self._read.clear()
        return saves

    def discard(self, slots: set[int]) -> None:
        """Free slots whose saves were not carried out."""
        lost = [block_hash for block_hash, slot in self._slot_of.items() if slot in slots]
        for block_hash in lost:
            self._free.append(self._slot_of.pop(block_hash))

    def check_integrity(self) -> None:
        used = [*self._slot_of.values(), *self._free]
        if sorted(used) != list(range(self.slots)):
            raise AssertionError(f"host slots are lost or in two places: {sorted(used)[:16]}")
