"""The host's memory for blocks that the device has no room for: a second, slower pool."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan


def blocks_of(cache: Tensor, block_tokens: int) -> Tensor:
    """cache: [layers, 2, kv_heads, slots, head_size] → [layers, 2, kv_heads, blocks, numbers of a block]

    Eight-bit numbers are taken as bytes: torch copies those everywhere.
    """
    numbers = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return numbers.view(*cache.shape[:3], -1, block_tokens * cache.shape[4])


class HostCache:
    def __init__(self, cache: Tensor, slots: int, block_tokens: int) -> None:
        """cache: [layers, 2, kv_heads, slots, head_size], the device's"""
        self._blocks = blocks_of(cache, block_tokens)
        shape = (slots, *self._blocks.shape[:3], self._blocks.shape[4])  # what moves together lies together
        self._host = torch.empty(shape, dtype=self._blocks.dtype, pin_memory=cache.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def move(self, plan: StepPlan) -> None:
        """What is saved leaves before anything overwrites it. All in the order of the device's own work."""
        for block, slot in plan.saves:
            self._host[slot].copy_(self._blocks[:, :, :, block], non_blocking=True)
        for slot, block in plan.loads:
            self._blocks[:, :, :, block].copy_(self._host[slot], non_blocking=True)
