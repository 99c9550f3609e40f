"""Joins the tensors of several responses: rows are concatenated, shorter ones are padded."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from slipstream.server.kserve.tensors import Array, Tensor

THREAD_ABOVE_VALUES = 1 << 18  # values from which joining runs in a thread


def one_after_another(
    tensors: Sequence[Tensor], dims: tuple[int, ...], filler: Any
) -> Array | list[bytes]:
    """Return the values of all tensors, each row of the first dimension padded to `dims`.

    A filler may be a tuple, which holds one value for each index of the next dimension.
    """
    if tensors[0].datatype == "BYTES":
        return _join_strings(tensors, dims, filler)
    parts = [tensor.array().reshape(tensor.shape) for tensor in tensors]
    joined = np.empty((sum(map(len, parts)), *dims), parts[0].dtype)
    if isinstance(filler, tuple):
        filler = np.reshape(filler, (len(filler), *(1 for _ in dims[1:])))
    row = 0
    for part in parts:
        place = joined[row : row + len(part)]
        if part.shape != place.shape:
            place[...] = filler
        place[tuple(slice(size) for size in part.shape)] = part
        row += len(part)
    return joined.reshape(-1)


def _join_strings(tensors: Sequence[Tensor], dims: tuple[int, ...], filler: bytes) -> list[bytes]:
    joined: list[bytes] = []
    for tensor in tensors:
        strings = tensor.strings()
        width = prod(tensor.shape[1:])
        for row in range(tensor.shape[0]):
            items = strings[row * width : (row + 1) * width]
            joined += _pad_strings(items, tensor.shape[1:], dims, filler)
    return joined


def _pad_strings(
    items: list[bytes], shape: tuple[int, ...], dims: tuple[int, ...], filler: bytes
) -> list[bytes]:
    if shape == dims:
        return items
    width = prod(shape[1:])
    padded: list[bytes] = []
    for index in range(shape[0]):
        inner = items[index * width : (index + 1) * width]
        padded += _pad_strings(inner, shape[1:], dims[1:], filler)
    return padded + [filler] * (prod(dims) - len(padded))
