"""Low-rank additions to a layer's linears, y += B (A x), with another A and B for each token.

Adapters lie in pages. A page has room for `rank` rows of A and `rank` columns of B of every linear
of every layer; an adapter of a higher rank takes several pages, and what it adds is the sum of what
its pages add. Page 0 is nobody's.

    a page:   layer 0 [ qkv A | qkv B | dense A | dense B | first A | first B | proj A | proj B ]  layer 1 [ …

Where a linear is several in one (q, k and v; the two halves of a gated mlp), each part has its own
A and B: A is [parts * rank, in], and B, stored with its columns as rows, is [rank, out] over the
parts side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

# the linears of a layer, in the order they are computed
LINEARS = QKV, O_PROJ, UP_PROJ, DOWN_PROJ = range(4)

_ALIGNED = 64  # elements: where a matrix begins, so that kernels read whole cache lines
# up to this many, the tokens of an adapter go into one batched linear with other adapters' tokens
_FEW_TOKENS = 8


class LinearShape(NamedTuple):
    inputs: int
    outputs: tuple[int, ...]  # of each part; () where the layer has no such linear


class StepAdapters(Protocol):
    """Which adapter each token of a step runs through, planned once and used by every layer."""

    def add(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        """Add to y [tokens, out] what the adapters make of x [tokens, in]."""


class PageLayout:
    """Where in a page each matrix lies."""

    def __init__(self, shapes: Sequence[LinearShape], layers: int, rank: int) -> None:
        self.shapes, self.layers, self.rank = tuple(shapes), layers, rank
        self._starts: list[tuple[int, int]] = []  # of A and of B within a layer
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
        """Where in a page A and B of the linear begin."""
        first, second = self._starts[linear]
        return layer * self.layer_elements + first, layer * self.layer_elements + second

    def first(self, memory: Tensor, layer: int, linear: int) -> Tensor:
        """All pages' A: [pages, parts * rank, in]"""
        shape, (start, _) = self.shapes[linear], self.starts(layer, linear)
        rows = len(shape.outputs) * self.rank
        return memory[:, start : start + rows * shape.inputs].view(-1, rows, shape.inputs)

    def second(self, memory: Tensor, layer: int, linear: int) -> Tensor:
        """All pages' B: [pages, rank, out]"""
        outputs, (_, start) = sum(self.shapes[linear].outputs), self.starts(layer, linear)
        return memory[:, start : start + self.rank * outputs].view(-1, self.rank, outputs)


class Matrices(NamedTuple):
    """What an adapter adds to one part of one linear."""

    layer: int
    linear: int
    part: int
    first: np.ndarray  # A: [rank, in]
    second: np.ndarray  # B with its columns as rows: [rank, out]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in the host's memory, in the type it is computed in, and how it is spread over
    pages.
    """

    rank: int  # the highest among its matrices
    values: Tensor  # [n]: all of them, one after the other
    # of each page: int32 [runs, 3], where a run begins in `values` and in the page, and its length
    runs: list[Tensor]
    linears: list[int]  # of each page: bit p, where it adds something to linear p

    @property
    def bytes(self) -> int:
        return self.values.nbytes


def pack_adapter(
    layout: PageLayout, matrices: Sequence[Matrices], dtype: torch.dtype, device: torch.device
) -> HostAdapter:
    """device: the one that it will be computed on; a GPU copies from memory that it can read by
    itself.
    """
    rank = max(one.first.shape[0] for one in matrices)
    pages = layout.pages_for(rank)
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(pages)]
    linears, at = [0] * pages, 0
    for one in matrices:
        for page in range(layout.pages_for(one.first.shape[0])):
            linears[page] |= 1 << one.linear
            runs[page] += _runs(layout, one, page, at)
        at += one.first.size + one.second.size
    joined = np.concatenate([half.ravel() for one in matrices for half in (one.first, one.second)])
    values = torch.from_numpy(joined.astype(np.float32, copy=False)).to(dtype)
    tables = [torch.tensor(table, dtype=torch.int32) for table in runs]
    if device.type == "cuda":
        values, tables = values.pin_memory(), [table.pin_memory() for table in tables]
    return HostAdapter(rank, values, tables, linears)


def _runs(layout: PageLayout, one: Matrices, page: int, at: int) -> list[tuple[int, int, int]]:
    """Where the page's share of one pair of matrices goes, which begins at `at` among the values: A
    in one run, since its rows lie one after the other in a page, too; B's rows one by one, between
    those of other parts.
    """
    outputs, size = layout.shapes[one.linear].outputs, layout.rank
    first_at, second_at = layout.starts(one.layer, one.linear)
    total, inputs = one.first.shape
    width, wide, column = outputs[one.part], sum(outputs), sum(outputs[: one.part])
    begin = page * size
    count = min(size, total - begin)
    found = [(at + begin * inputs, first_at + one.part * size * inputs, count * inputs)]
    second = at + one.first.size
    return found + [
        (second + (begin + row) * width, second_at + row * wide + column, width)
        for row in range(count)
    ]


class AdapterPages:
    """The pages in the memory of the device that computes."""

    def __init__(
        self,
        layout: PageLayout,
        total_pages: int,
        most_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """most_pages: of one adapter"""
        self.layout, self.most_pages = layout, most_pages
        self.memory = torch.zeros(total_pages + 1, layout.elements, dtype=dtype, device=device)
        # Bit p: the page adds something to linear p. What a page does not add need not be
        # computed.
        self.linears = np.zeros(total_pages + 1, dtype=np.int32)
        self.device_linears = torch.zeros(total_pages + 1, dtype=torch.int32, device=device)

    def write(self, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Put an adapter into these pages, in place of what was there. The host waits for nothing."""
        device = self.memory.device
        spread = _spread
        if device.type == "cuda":
            # needs Triton, which a CPU installation lacks
            from slipstream.kernels.gpu.adapters import spread
        values = adapter.values.to(device, non_blocking=True)
        for page, runs, linears in zip(pages, adapter.runs, adapter.linears, strict=True):
            self.memory[page].zero_()
            spread(values, runs.to(device, non_blocking=True), self.memory[page])
            self.linears[page] = linears
            self.device_linears[page] = linears


def _spread(values: Tensor, runs: Tensor, page: Tensor) -> None:
    """Copy runs of values to their places in a page."""
    source, target = values.numpy(), page.numpy()
    for start, place, length in runs.tolist():
        target[place : place + length] = source[start : start + length]


class CpuStepAdapters:
    """Tokens grouped by adapter. Each of the larger groups is a linear of its own; small ones are
    batched together.
    """

    def __init__(
        self, pages: AdapterPages, pages_of_row: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> None:
        """pages_of_row: the pages of each row of the step; counts: its tokens, which lie one row
        after the other.
        """
        self._pages = pages
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        start = 0
        for row_pages, count in zip(pages_of_row, counts, strict=True):
            if row_pages:
                groups.setdefault(tuple(row_pages), []).append(np.arange(start, start + count))
            start += count
        tokens = {key: np.concatenate(ranges) for key, ranges in groups.items()}
        small = {key: found for key, found in tokens.items() if len(found) <= _FEW_TOKENS}
        self._large = [
            (key, _places(found)) for key, found in tokens.items() if len(found) > _FEW_TOKENS
        ]
        self._small = [_Batch.of(self._adding(small, linear)) for linear in LINEARS]

    def _adding(
        self, groups: dict[tuple[int, ...], np.ndarray], linear: int
    ) -> dict[int, np.ndarray]:
        """page → tokens, of those pages that add something to the linear."""
        return {
            page: tokens
            for key, tokens in sorted(groups.items())
            for page in self._pages_with(key, linear)
        }

    def _pages_with(self, pages: Sequence[int], linear: int) -> list[int]:
        return [page for page in pages if self._pages.linears[page] >> linear & 1]

    def add(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        layout, memory = self._pages.layout, self._pages.memory
        outputs = layout.shapes[linear].outputs
        first, second = layout.first(memory, layer, linear), layout.second(memory, layer, linear)
        batch = self._small[linear]
        if batch is not None:
            batch.add(y, x, first, second, outputs)
        for pages, tokens in self._large:
            adding = self._pages_with(pages, linear)
            if adding:
                _add_group(y, x, tokens, first[adding], second[adding], outputs)


def _add_group(
    y: Tensor,
    x: Tensor,
    tokens: Tensor | slice,
    first: Tensor,
    second: Tensor,
    outputs: tuple[int, ...],
) -> None:
    """The tokens of one adapter. first: [pages, parts * rank, in], second: [pages, rank, out]"""
    pages, rank = second.shape[:2]
    middle = x[tokens].to(first.dtype) @ first.flatten(0, 1).t()  # [n, pages * parts * rank]
    middle = middle.view(-1, pages, len(outputs), rank)
    column, added = 0, []
    for part, width in enumerate(outputs):
        added.append(
            middle[:, :, part].flatten(1) @ second[:, :, column : column + width].flatten(0, 1)
        )
        column += width
    delta = torch.cat(added, dim=1).to(y.dtype)
    if isinstance(tokens, slice):
        y[tokens] += delta
    else:
        y.index_add_(0, tokens, delta)


class _Batch(NamedTuple):
    """Pages with few tokens each: one batched linear over all of them, padded to the most tokens a
    page has.
    """

    pages: Tensor | slice  # [n], or the run of pages they lie in
    tokens: Tensor  # [n * most]: whose x goes where; padding takes any token's
    most: int
    start: int  # the tokens concerned lie in start:end
    end: int
    # [end - start] each: which results a token adds; the one behind the last is zero
    places: list[Tensor]
    aligned: bool  # there is one result for each token, in the order of the tokens

    @staticmethod
    def of(groups: dict[int, np.ndarray]) -> _Batch | None:
        if not groups:
            return None
        pages = sorted(groups)
        span = pages[-1] - pages[0] + 1
        # computing a few pages in vain costs less than copying those in use
        whole = span <= 2 * len(pages)
        slots = range(pages[0], pages[-1] + 1) if whole else pages
        most = max(map(len, groups.values()))
        start = min(int(tokens[0]) for tokens in groups.values())
        end = max(int(tokens[-1]) for tokens in groups.values()) + 1
        taken = np.full((len(slots), most), start)
        uses: list[list[int]] = [[] for _ in range(end - start)]
        for slot, page in enumerate(slots):
            for column, token in enumerate(groups.get(page, ())):
                taken[slot, column] = token
                uses[token - start].append(slot * most + column)
        nothing = taken.size
        depth = max(map(len, uses))
        padded = np.array([use + [nothing] * (depth - len(use)) for use in uses])
        aligned = depth == 1 and np.array_equal(padded[:, 0], np.arange(nothing))
        return _Batch(
            slice(slots[0], slots[-1] + 1) if whole else torch.tensor(pages),
            torch.from_numpy(taken.reshape(-1)),
            most,
            start,
            end,
            list(torch.from_numpy(padded).t().contiguous()),
            aligned,
        )

    def add(
        self, y: Tensor, x: Tensor, first: Tensor, second: Tensor, outputs: tuple[int, ...]
    ) -> None:
        first, second = first[self.pages], second[self.pages]
        given = x[self.tokens].to(first.dtype).view(-1, self.most, x.shape[1])
        middle = torch.bmm(given, first.transpose(1, 2))  # [n, most, parts * rank]
        rank, column = second.shape[1], 0
        for part, width in enumerate(outputs):
            given, matrix = (
                middle[:, :, part * rank : (part + 1) * rank],
                second[:, :, column : column + width],
            )
            target = y[self.start : self.end, column : column + width]
            if self.aligned:
                target += torch.bmm(given, matrix).flatten(0, 1)
            else:
                added = middle.new_empty(self.tokens.shape[0] + 1, width)
                added[-1] = 0
                torch.bmm(given, matrix, out=added[:-1].view(-1, self.most, width))
                for places in self.places:
                    target += added.index_select(0, places)
            column += width


def _places(tokens: np.ndarray) -> Tensor | slice:
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
