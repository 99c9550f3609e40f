"""Host memory for blocks that were evicted from the device: a second, slower pool."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan
from slipstream.engine.with_torch.arrays import as_tensor

_PIECE_BYTES = 2**30


def view_blocks(cache: Tensor, block_tokens: int) -> Tensor:
    """View a cache [layers, 2, kv_heads, slots, head_size] as blocks [layers, 2, kv_heads, blocks,
    values of a block].

    8-bit values are viewed as bytes, which torch can copy on every device.
    """
    values = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return values.view(*cache.shape[:3], -1, block_tokens * cache.shape[4])


class HostCache:
    """Slots for blocks in the host's memory.

    torch rounds pinned memory up to a power of two. One large tensor could take twice the bytes
    asked for; tensors of just under 1 GiB take hardly more.
    """

    def __init__(self, cache: Tensor | np.ndarray, slots: int, block_tokens: int) -> None:
        """cache: [layers, 2, kv_heads, slots, head_size] on the device"""
        if isinstance(cache, np.ndarray):
            cache = as_tensor(cache)
        self._blocks = view_blocks(cache, block_tokens)
        # The values of one slot are contiguous, because they move together.
        shape = (*self._blocks.shape[:3], self._blocks.shape[4])
        slot_bytes = math.prod(shape) * self._blocks.dtype.itemsize
        self._slots_per_piece = max(1, _PIECE_BYTES // slot_bytes)
        pinned = cache.device.type == "cuda"
        self._pieces = [
            torch.empty(
                (min(self._slots_per_piece, slots - first), *shape),
                dtype=self._blocks.dtype,
                pin_memory=pinned,
            )
            for first in range(0, slots, self._slots_per_piece)
        ]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def move(self, plan: StepPlan) -> None:
        """Copy a plan's blocks to and from the host, in the order of the device's own work.

        Saves come first: later work of the plan overwrites the saved blocks.
        """
        for block, slot in plan.saves:
            self._slot(slot).copy_(self._blocks[:, :, :, block], non_blocking=True)
        for slot, block in plan.loads:
            self._blocks[:, :, :, block].copy_(self._slot(slot), non_blocking=True)

    def _slot(self, slot: int) -> Tensor:
        piece: Tensor = self._pieces[slot // self._slots_per_piece]
        return piece[slot % self._slots_per_piece]
