"""The numbers of requests that each front end has at each engine, in shared memory.

Queue limits hold for the server as a whole, so each front end must see the requests of the others
at once. Each cell has one writer: the front end that it belongs to.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable

SLOTS = 256  # engines at the same time, and one row for the totals
_TOTALS = 0  # row of the requests that each front end has sent to engines since the start
_CELL = struct.Struct("=q")


class InFlightTable:
    """A table with one row for each engine and one column for each front end."""

    def __init__(self, frontends: int, descriptor: int | None = None) -> None:
        """`descriptor`: the table of another process; None: create one."""
        size = SLOTS * frontends * _CELL.size
        if descriptor is None:
            descriptor = os.memfd_create("slipstream-in-flight")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._frontends = frontends
        self._memory = mmap.mmap(descriptor, size)

    def writer(self, slot: int, index: int) -> Callable[[int], None]:
        """Return a function that sets the requests in flight of one front end at one engine."""
        former = 0

        def write(count: int) -> None:
            nonlocal former
            if count > former:
                self._write(_TOTALS, index, self._read(_TOTALS, index) + count - former)
            former = count
            self._write(slot, index, count)

        return write

    def count_others(self, slot: int, index: int) -> int:
        """Return the requests that all other front ends have in flight at an engine."""
        return sum(self._read(slot, other) for other in range(self._frontends) if other != index)

    def count_frontend(self, index: int) -> int:
        """Return the requests that a front end has in flight at all engines."""
        return sum(self._read(slot, index) for slot in range(_TOTALS + 1, SLOTS))

    def total(self, index: int) -> int:
        """Return the requests that a front end has sent to engines since the start."""
        return self._read(_TOTALS, index)

    def clear_slot(self, slot: int) -> None:
        for index in range(self._frontends):
            self._write(slot, index, 0)

    def clear_frontend(self, index: int) -> None:
        """Remove the requests in flight of a front end that has ended."""
        for slot in range(_TOTALS + 1, SLOTS):
            self._write(slot, index, 0)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    def _read(self, slot: int, index: int) -> int:
        count: int = _CELL.unpack_from(self._memory, self._place(slot, index))[0]
        return count

    def _write(self, slot: int, index: int, count: int) -> None:
        _CELL.pack_into(self._memory, self._place(slot, index), count)

    def _place(self, slot: int, index: int) -> int:
        return (slot * self._frontends + index) * _CELL.size
