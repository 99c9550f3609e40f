"""Weights of an engine folder as tensors of torch."""

from __future__ import annotations

import warnings

import torch

from slipstream.kernels.blocks import BlockMatrix
from slipstream.kernels.stored import StoredArray, Weight

_TYPES = {  # those that numpy lacks
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def to_tensor(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as a tensor: mapped as it is, or expanded from blocks to `dtype`."""
    return expand(weight, dtype) if isinstance(weight, BlockMatrix) else map_tensor(weight)


def map_tensor(weight: StoredArray) -> torch.Tensor:
    """Return a tensor on the memory of an array, which must not be written to."""
    with warnings.catch_warnings():
        # The file is mapped read-only. Nothing writes to weights.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(weight.array)
    return tensor.view(_TYPES[weight.code]) if weight.code in _TYPES else tensor


def expand(
    matrix: BlockMatrix, dtype: torch.dtype, columns: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return the weights of a matrix that is stored in blocks: all columns, or those from the first
    to the last (exclusive).
    """
    count, width = matrix.shape
    first, last = columns or (0, width)
    out = torch.empty((count, last - first), dtype=dtype)
    start = 0
    for rows in matrix.expand():
        out[start : start + len(rows)] = torch.from_numpy(rows[:, first:last])
        start += len(rows)
    return out
