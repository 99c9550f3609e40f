"""Lay out weights for compiled code: 32 outputs together, with one stream of memory for a tile.

    F32   [outputs / 32][inputs][32] float32
    BF16  [outputs / 32][inputs / 2][32][2] bfloat16

Outputs are padded to a multiple of 32 and inputs to a multiple of 32, with zeros. A gated layer has
16 outputs of the activated half and the 16 that multiply them in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.kernels.cpu.layout import BLOCK, LANES
from slipstream.kernels.cpu.memory import aligned, round_up
from slipstream.kernels.cpu.operations import WeightFormat


@dataclass(frozen=True)
class Packed:
    """The weights of a linear layer."""

    format: WeightFormat
    data: np.ndarray  # bytes
    outputs: int  # with padding
    inputs: int  # with padding

    @property
    def blocks(self) -> int:
        return self.outputs // BLOCK

    @property
    def block_bytes(self) -> int:
        return self.data.nbytes // self.blocks

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


def pack(weight: np.ndarray, gated: bool = False) -> Packed:
    """Return packed weights. weight: [outputs, inputs], float32, or bfloat16 as uint16."""
    if gated:
        weight = interleave_halves(weight)
    outputs, inputs = weight.shape
    rows = round_up(outputs, BLOCK)
    columns = round_up(inputs, BLOCK)
    if (rows, columns) != weight.shape:
        weight = np.pad(weight, ((0, rows - outputs), (0, columns - inputs)))
    words = np.ascontiguousarray(weight).view(np.uint32)  # [rows, words of a row]
    data = aligned(words.nbytes)
    target = data.view(np.uint32).reshape(rows // BLOCK, -1, BLOCK)
    target[...] = words.reshape(rows // BLOCK, BLOCK, -1).transpose(0, 2, 1)
    kind = WeightFormat.BF16 if weight.dtype == np.uint16 else WeightFormat.F32
    return Packed(kind, data, rows, columns)


def interleave_halves(rows: np.ndarray) -> np.ndarray:
    """Return 16 rows of the first half, then 16 of the second half, and so on. Each half is padded
    to a multiple of 16.
    """
    half = len(rows) // 2
    padded = round_up(half, LANES)
    shape = (padded // LANES, 2 * LANES, *rows.shape[1:])
    mixed = np.zeros((2, padded, *rows.shape[1:]), dtype=rows.dtype)
    mixed[0, :half] = rows[:half]
    mixed[1, :half] = rows[half:]
    by_block = mixed.reshape(2, padded // LANES, LANES, *rows.shape[1:])
    return np.ascontiguousarray(by_block.swapaxes(0, 1)).reshape(-1, *shape[2:])


def padded_floats(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return a float32 vector with zeros behind it, aligned."""
    found = aligned(size * 4).view(np.float32)
    found[: len(numbers)] = numbers
    return found
