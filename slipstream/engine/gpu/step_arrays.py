"""The int32 arrays that describe one GPU step, each with a name, and the order of its rows.

The arrays of a step lie one after the other in one piece of device memory, so that a single copy
fills all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import StepPlan
from slipstream.engine.with_torch.transfer import to_device
from slipstream.kernels.gpu.decode_chunks import CHUNK_FIELDS, DecodePlan
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan

Item = TypeVar("Item")
EMPTY = np.zeros(0, dtype=np.int32)


class StepArrays(NamedTuple, Generic[Item]):
    """Sizes (int), host arrays (numpy) or device arrays (torch) of one step.

    An array that a step does not need is empty. Rows with one new token come first in a step.
    """

    rows: Item  # [tokens]: the row of each token
    positions: Item  # [tokens]: the position of each token in its row
    lengths: Item  # [decode rows]: where the sampled token of a row is written
    logit_tokens: Item  # [logits]: the tokens of the step whose logits are computed
    chunks: Item  # [chunks * CHUNK_FIELDS]: attention work of rows with one new token
    # Attention work of rows with several new tokens, [tiles] each; see PrefillPlan.
    tile_token: Item
    tile_position: Item
    tile_queries: Item
    tile_row: Item
    tile_cached: Item


def decode_plan(arrays: StepArrays[Tensor]) -> DecodePlan:
    return DecodePlan(arrays.chunks.view(-1, CHUNK_FIELDS))


def prefill_plan(arrays: StepArrays[Tensor], large_tiles: bool = False) -> PrefillPlan:
    """`large_tiles`: whether the tiles are large."""
    return PrefillPlan(
        tile_token=arrays.tile_token,
        tile_position=arrays.tile_position,
        tile_queries=arrays.tile_queries,
        tile_row=arrays.tile_row,
        tile_cached=arrays.tile_cached,
        large_tiles=large_tiles,
    )


def aligned(count: int) -> int:
    """Round a number of int32 values up to a multiple of 16 bytes.

    Kernels are compiled again for arrays that begin at another alignment.
    """
    return -(-count // 4) * 4


def pack(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device as int32, with one copy for all of them."""
    starts = np.cumsum([0] + [aligned(len(array)) for array in arrays]).tolist()
    staged = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        staged[start : start + len(array)] = array
    moved = to_device(staged, device)
    return [moved[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]


def to_device_arrays(arrays: StepArrays[np.ndarray], device: torch.device) -> StepArrays[Tensor]:
    """Copy the arrays of a step to the device, with one copy for all of them."""
    return StepArrays._make(pack(arrays, device))


class StaticStepArrays:
    """Step arrays of fixed size in memory that a captured graph reads."""

    def __init__(self, sizes: StepArrays[int], device: torch.device) -> None:
        starts = np.cumsum([0] + [aligned(size) for size in sizes]).tolist()
        # (index in StepArrays, start, size) of the arrays that are not empty
        self._used = [
            (index, start, size)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=False))
            if size
        ]
        self._length = starts[-1]
        self._memory = torch.zeros(self._length, dtype=torch.int32, device=device)
        self.arrays: StepArrays[Tensor] = StepArrays._make(
            self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)
        )

    def fill(self, values: StepArrays[np.ndarray]) -> None:
        """Copy the arrays of a step to the device. Unused space behind each array becomes zeros."""
        staged = np.zeros(self._length, dtype=np.int32)
        for index, start, size in self._used:
            array = values[index]
            assert len(array) <= size, f"{len(array)} values for an array of {size}"
            staged[start : start + len(array)] = array
        self._memory.copy_(to_device(staged, self._memory.device), non_blocking=True)


class StepRows(NamedTuple):
    """The rows of a step, those with one new token first."""

    order: list[int]  # [rows]: the plan entry of each row
    rows: np.ndarray  # [rows]
    positions: np.ndarray  # [rows]: position of the first new token
    counts: np.ndarray  # [rows]: number of new tokens


def sort_rows(plan: StepPlan) -> StepRows:
    """Return the rows of a plan, those with one new token first."""
    order = sorted(range(len(plan.rows)), key=lambda entry: plan.counts[entry] > 1)
    return StepRows(
        order=order,
        rows=np.array([plan.rows[entry] for entry in order]),
        positions=np.array([plan.positions[entry] for entry in order]),
        counts=np.array([plan.counts[entry] for entry in order]),
    )
