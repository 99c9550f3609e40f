"""The host's memory for blocks that the device has no room for: a second, slower pool."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan

_PIECE_BYTES = 2**30


def blocks_of(cache: Tensor, block_tokens: int) -> Tensor:
    """cache: [layers, 2, kv_heads, slots, head_size] → [layers, 2, kv_heads, blocks, numbers of a
    block]

    Eight-bit numbers are taken as bytes: torch copies those everywhere.
    """
    numbers = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return numbers.view(*cache.shape[:3], -1, block_tokens * cache.shape[4])


class HostCache:
    """Slots for blocks. Memory that a device reads is handed out in powers of two: in one piece,
    the slots could take twice what was asked for; in pieces just below such a power, they take
    hardly more.
    """

    def __init__(self, cache: Tensor, slots: int, block_tokens: int) -> None:
        """cache: [layers, 2, kv_heads, slots, head_size], the device's"""
        self._blocks = blocks_of(cache, block_tokens)
        # of a slot: what moves together lies together
        shape = (*self._blocks.shape[:3], self._blocks.shape[4])
        # slots of a piece
        self._each = max(1, _PIECE_BYTES // (math.prod(shape) * self._blocks.dtype.itemsize))
        pinned = cache.device.type == "cuda"
        self._pieces = [
            torch.empty(
                (min(self._each, slots - first), *shape),
                dtype=self._blocks.dtype,
                pin_memory=pinned,
            )
            for first in range(0, slots, self._each)
        ]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def move(self, plan: StepPlan) -> None:
        """What is saved leaves before anything overwrites it. All in the order of the device's own
        work.
        """
        for block, slot in plan.saves:
            self._slot(slot).copy_(self._blocks[:, :, :, block], non_blocking=True)
        for slot, block in plan.loads:
            self._blocks[:, :, :, block].copy_(self._slot(slot), non_blocking=True)

    def _slot(self, slot: int) -> Tensor:
        return self._pieces[slot // self._each][slot % self._each]
