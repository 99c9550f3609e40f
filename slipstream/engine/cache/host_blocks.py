"""Which blocks lie in the host's memory, after the device had no room for them any more. No torch
here.

A slot holds the content of one full block under its name. What was used least recently gives way. A
slot that the plan in the making reads is not given to another block before that plan is complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostBlocks:
    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        self._of: OrderedDict[bytes, int] = OrderedDict()  # name → slot, least recently used first
        self._free = list(range(slots))
        self._read: set[int] = set()
        self._saves: dict[int, int] = {}  # slot → the block whose content it shall have

    def __len__(self) -> int:
        return len(self._of)

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """The longest known beginning of a chain of names."""
        found = []
        for name in names:
            if name not in self._of:
                break
            found.append(name)
        return found

    def save(self, block: int, name: bytes) -> None:
        """The block's content is about to be lost: keep it, if a slot can be had."""
        if not self.slots or name in self._of:
            return
        if not self._free:
            oldest = next(
                (known for known, slot in self._of.items() if slot not in self._read), None
            )
            if oldest is None:
                return
            self._free.append(self._of.pop(oldest))
        slot = self._free.pop()
        self._of[name] = slot
        self._saves[slot] = block

    def read(self, name: bytes) -> int:
        """The slot of a name, which stays what it is until the plan is complete."""
        self._of.move_to_end(name)
        slot = self._of[name]
        self._read.add(slot)
        return slot

    def complete(self) -> list[tuple[int, int]]:
        """(block, slot) of everything to be saved by the plan that is now complete."""
        saves = [(block, slot) for slot, block in self._saves.items()]
        self._saves.clear()
        self._read.clear()
        return saves

    def lose(self, slots: set[int]) -> None:
        """Nothing was written to these."""
        for name in [name for name, slot in self._of.items() if slot in slots]:
            self._free.append(self._of.pop(name))

    def check_integrity(self) -> None:
        used = [*self._of.values(), *self._free]
        if sorted(used) != list(range(self.slots)):
            raise AssertionError(f"slots of the host are lost or doubled: {sorted(used)[:16]}")
