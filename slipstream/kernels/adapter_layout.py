"""The layout of LoRA adapters in pages: see `kernels/adapters.py`. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# the linear layers of a transformer layer, in the order they are computed
LINEARS = QKV, O_PROJ, UP_PROJ, DOWN_PROJ = range(4)

_ALIGNED = 64  # elements that matrices are aligned to, so that kernels read whole cache lines


class LinearShape(NamedTuple):
    inputs: int
    outputs: tuple[int, ...]  # per part; () if the model has no such linear layer


class PageLayout:
    """The position of each matrix in a page."""

    def __init__(self, shapes: Sequence[LinearShape], layers: int, rank: int) -> None:
        self.shapes = tuple(shapes)
        self.layers = layers
        self.rank = rank
        self._starts: list[tuple[int, int]] = []  # positions of A and B within a layer
        position = 0
        for shape in self.shapes:
            second = position + _aligned(len(shape.outputs) * rank * shape.inputs)
            self._starts.append((position, second))
            position = second + _aligned(rank * sum(shape.outputs))
        self.layer_elements = position
        self.elements = layers * position

    def pages_for(self, rank: int) -> int:
        return -(-rank // self.rank)

    def starts(self, layer: int, linear: int) -> tuple[int, int]:
        """Return the positions of a linear layer's A and B in a page."""
        first, second = self._starts[linear]
        return layer * self.layer_elements + first, layer * self.layer_elements + second

    def first(self, memory: Tensor, layer: int, linear: int) -> Tensor:
        """Return A of all pages: [pages, parts * rank, in]."""
        shape = self.shapes[linear]
        start, _ = self.starts(layer, linear)
        rows = len(shape.outputs) * self.rank
        return memory[:, start : start + rows * shape.inputs].view(-1, rows, shape.inputs)

    def second(self, memory: Tensor, layer: int, linear: int) -> Tensor:
        """Return B of all pages: [pages, rank, out]."""
        outputs = sum(self.shapes[linear].outputs)
        _, start = self.starts(layer, linear)
        return memory[:, start : start + self.rank * outputs].view(-1, self.rank, outputs)


class Matrices(NamedTuple):
    """A and B of an adapter for one part of one linear layer."""

    layer: int
    linear: int
    part: int
    first: np.ndarray  # A: [rank, in]
    second: np.ndarray  # B transposed: [rank, out]


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
