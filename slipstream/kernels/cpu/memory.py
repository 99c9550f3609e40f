"""Memory that compiled code reads and writes."""

from __future__ import annotations

import mmap

import numpy as np

ALIGNMENT = 64


def aligned(count: int) -> np.ndarray:
    """Return zeroed bytes that begin at a multiple of 64. A page takes memory once it is used."""
    room = np.zeros(count + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + count]


def sparse(count: int) -> np.ndarray:
    """Return zeroed bytes for use here and there: pages are small, so that a used one takes 4 KiB
    and not 2 MiB.
    """
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def aligned_rows(rows: int, columns: int, dtype: type) -> np.ndarray:
    """Return a zeroed array [rows, columns]."""
    found = aligned(rows * columns * np.dtype(dtype).itemsize)
    return found.view(dtype).reshape(rows, columns)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
