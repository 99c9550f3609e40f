"""Tensors of several answers made one: the rows of each after the other, shorter ones filled up.

Logits are millions of numbers. They stay a view of bytes all the way, and are copied by a library
that lets other threads run meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from slipstream.server.kserve.tensors import Tensor

LONG = 1 << 18  # numbers from which it is worth a thread


def numbers(tensors: Iterable[Tensor]) -> int:
    return sum(len(tensor.data) for tensor in tensors)


def one_after_another(tensors: Sequence[Tensor], dims: tuple[int, ...], filler: Any) -> Any:
    """The values of all, each row of the first dimension filled up to `dims`. A filler may be a
    tuple: for each of the rows below its own.
    """
    if all(isinstance(tensor.data, (array, memoryview)) for tensor in tensors):
        return _copied(tensors, dims, filler)
    joined: list[Any] = []
    for tensor in tensors:
        width = prod(tensor.shape[1:])
        for row in range(tensor.shape[0]):
            joined += _filled(
                tensor.data[row * width : (row + 1) * width], tensor.shape[1:], dims, filler
            )
    return joined


def _copied(tensors: Sequence[Tensor], dims: tuple[int, ...], filler: Any) -> memoryview:
    import numpy as np

    parts = [np.asarray(tensor.data).reshape(tensor.shape) for tensor in tensors]
    joined = np.empty((sum(map(len, parts)), *dims), parts[0].dtype)
    row = 0
    for part in parts:
        place = joined[row : row + len(part)]
        if part.shape != place.shape:
            place[...] = filler
        place[tuple(slice(size) for size in part.shape)] = part
        row += len(part)
    return joined.reshape(-1).data


def _filled(
    data: list[Any], shape: tuple[int, ...], dims: tuple[int, ...], filler: Any
) -> list[Any]:
    if shape == dims:
        return data
    width, filled = prod(shape[1:]), []
    for item in range(shape[0]):
        own = filler[item] if isinstance(filler, tuple) else filler
        filled += _filled(data[item * width : (item + 1) * width], shape[1:], dims[1:], own)
    return filled + [filler] * (prod(dims) - len(filled))
