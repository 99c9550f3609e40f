"""LoRA adapters: low-rank additions to linear layers, y += B (A x), with another A and B per token.

Adapters are kept in pages. A page has room for `rank` rows of A and `rank` columns of B of every
linear layer of every transformer layer. An adapter of a higher rank takes several pages and adds
the sum of what its pages add. Page 0 is never used.

    a page:  layer 0 [ qkv A | qkv B | o A | o B | up A | up B | down A | down B ]  layer 1 [ …

Where a linear layer is several in one (q, k and v; the two halves of a gated MLP), each part has
its own A and B: A is [parts * rank, in]. B is stored transposed, [rank, out], with the parts side
by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.adapter_layout import LINEARS, Matrices, PageLayout
from slipstream.kernels.linear import in_fixed_batches

# Up to this many tokens of an adapter go into one batched GEMM with other adapters' tokens.
_BATCHED_TOKENS = 8


class StepAdapters(Protocol):
    """The adapter of each token of a step, planned once and used by every layer."""

    def add(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        """Add the adapters' output for x [tokens, in] to y [tokens, out], in place."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, in the type it is computed in, and its layout in pages."""

    rank: int  # the highest rank among its matrices
    values: Tensor  # [n]: all matrices, one after the other
    # per page: int32 [runs, (start in `values`, start in the page, length)]
    runs: list[Tensor]
    linears: list[int]  # per page: bit i is set if the page adds to linear layer i

    @property
    def bytes(self) -> int:
        return self.values.nbytes


def pack_adapter(
    layout: PageLayout, matrices: Sequence[Matrices], dtype: str, device: str
) -> HostAdapter:
    """Return the adapter laid out for pages. dtype: a name such as "float32"; device: the device
    that computes it, for a GPU the memory is pinned
    """
    rank = max(one.first.shape[0] for one in matrices)
    pages = layout.pages_for(rank)
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(pages)]
    linears = [0] * pages
    at = 0
    for one in matrices:
        for page in range(layout.pages_for(one.first.shape[0])):
            linears[page] |= 1 << one.linear
            runs[page] += _runs(layout, one, page, at)
        at += one.first.size + one.second.size
    halves: list[np.ndarray] = []
    for one in matrices:
        halves += (one.first.ravel(), one.second.ravel())
    numbers = np.concatenate(halves).astype(np.float32, copy=False)
    values = torch.from_numpy(numbers).to(getattr(torch, dtype))
    tables = [torch.tensor(table, dtype=torch.int32) for table in runs]
    if device.startswith("cuda"):
        values = values.pin_memory()
        tables = [table.pin_memory() for table in tables]
    return HostAdapter(rank, values, tables, linears)


def _runs(layout: PageLayout, one: Matrices, page: int, at: int) -> list[tuple[int, int, int]]:
    """Return the runs of a page's share of one pair of matrices, which begins at `at` in the
    values.

    A is one run, because its rows are contiguous in a page, too. B has a run per row, because rows
    of other parts are in between.
    """
    outputs = layout.shapes[one.linear].outputs
    size = layout.rank
    first_at, second_at = layout.starts(one.layer, one.linear)
    total, inputs = one.first.shape
    width = outputs[one.part]
    all_outputs = sum(outputs)
    column = sum(outputs[: one.part])
    begin = page * size
    count = min(size, total - begin)
    found = [(at + begin * inputs, first_at + one.part * size * inputs, count * inputs)]
    second = at + one.first.size
    return found + [
        (second + (begin + row) * width, second_at + row * all_outputs + column, width)
        for row in range(count)
    ]


class AdapterPages:
    """The adapter pages in device memory."""

    def __init__(
        self,
        layout: PageLayout,
        total_pages: int,
        most_pages: int,
        dtype: str,
        device: str,
    ) -> None:
        """most_pages: the most pages of one adapter; dtype, device: as torch names them"""
        self.layout = layout
        self.most_pages = most_pages
        shape = (total_pages + 1, layout.elements)
        self.memory = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        # Bit i is set if the page adds to linear layer i. Kernels skip the other layers.
        self.linears = np.zeros(total_pages + 1, dtype=np.int32)
        self.device_linears = torch.zeros(total_pages + 1, dtype=torch.int32, device=device)

    def on_cpu(
        self,
        pages_of_row: Sequence[Sequence[int]],
        counts: Sequence[int],
        batch_invariant: bool = False,
    ) -> CpuStepAdapters | None:
        """Return the adapters of a step on a CPU; None if none of its rows has one."""
        if not any(pages_of_row):
            return None
        return CpuStepAdapters(self, pages_of_row, counts, batch_invariant)

    def write(self, pages: Sequence[int], adapter: HostAdapter) -> None:
        """Write an adapter to these pages, in place of what was there, without waiting for the
        device.
        """
        device = self.memory.device
        copy_runs = _copy_runs
        if device.type == "cuda":
            # imported here: a CPU installation has no Triton
            from slipstream.kernels.gpu.copy_runs import copy_runs
        values = adapter.values.to(device, non_blocking=True)
        for page, runs, linears in zip(pages, adapter.runs, adapter.linears, strict=True):
            self.memory[page].zero_()
            copy_runs(values, runs.to(device, non_blocking=True), self.memory[page])
            self.linears[page] = linears
            self.device_linears[page] = linears


def _copy_runs(values: Tensor, runs: Tensor, page: Tensor) -> None:
    """Copy runs of values to their places in a page."""
    source = values.numpy()
    target = page.numpy()
    for start, place, length in runs.tolist():
        target[place : place + length] = source[start : start + length]


class CpuStepAdapters:
    """Tokens grouped by adapter. A large group has a GEMM of its own; small groups are batched."""

    def __init__(
        self,
        pages: AdapterPages,
        pages_of_row: Sequence[Sequence[int]],
        counts: Sequence[int],
        batch_invariant: bool = False,
    ) -> None:
        """pages_of_row: the pages of each row of the step; counts: the tokens of each row, which
        follow each other in the step; batch_invariant: compute a fixed number of tokens at a time
        """
        self._pages = pages
        self._batch_invariant = batch_invariant
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        start = 0
        for row_pages, count in zip(pages_of_row, counts, strict=True):
            if row_pages:
                groups.setdefault(tuple(row_pages), []).append(np.arange(start, start + count))
            start += count
        tokens = {key: np.concatenate(ranges) for key, ranges in groups.items()}
        most = 0 if batch_invariant else _BATCHED_TOKENS
        small = {key: found for key, found in tokens.items() if len(found) <= most}
        self._large = [
            (key, _as_slice(found)) for key, found in tokens.items() if len(found) > most
        ]
        self._small = [_Batch.of(self._tokens_by_page(small, linear)) for linear in LINEARS]

    def _tokens_by_page(
        self, groups: dict[tuple[int, ...], np.ndarray], linear: int
    ) -> dict[int, np.ndarray]:
        """Return the tokens of each page that adds to the linear layer."""
        found: dict[int, np.ndarray] = {}
        for key, tokens in sorted(groups.items()):
            found |= dict.fromkeys(self._pages_with(key, linear), tokens)
        return found

    def _pages_with(self, pages: Sequence[int], linear: int) -> list[int]:
        return [page for page in pages if self._pages.linears[page] >> linear & 1]

    def add(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        layout = self._pages.layout
        memory = self._pages.memory
        outputs = layout.shapes[linear].outputs
        first = layout.first(memory, layer, linear)
        second = layout.second(memory, layer, linear)
        batch = self._small[linear]
        if batch is not None:
            batch.add(y, x, first, second, outputs)
        for pages, tokens in self._large:
            adding = self._pages_with(pages, linear)
            if adding:
                output = partial(
                    _adapter_output, first=first[adding], second=second[adding], outputs=outputs
                )
                own = x[tokens]
                delta = in_fixed_batches(output, own) if self._batch_invariant else output(own)
                if isinstance(tokens, slice):
                    y[tokens] += delta.to(y.dtype)
                else:
                    y.index_add_(0, tokens, delta.to(y.dtype))


def _adapter_output(x: Tensor, first: Tensor, second: Tensor, outputs: tuple[int, ...]) -> Tensor:
    """Return one adapter's output for tokens x [n, in]: [n, out].

    first: [pages, parts * rank, in], second: [pages, rank, out]
    """
    pages, rank = second.shape[:2]
    middle = x.to(first.dtype) @ first.flatten(0, 1).t()  # [n, pages * parts * rank]
    middle = middle.view(-1, pages, len(outputs), rank)
    column = 0
    added = []
    for part, width in enumerate(outputs):
        matrix = second[:, :, column : column + width].flatten(0, 1)
        added.append(middle[:, :, part].flatten(1) @ matrix)
        column += width
    return torch.cat(added, dim=1)


class _Batch(NamedTuple):
    """Pages with few tokens each: one batched GEMM over all pages, padded to the most tokens of a
    page.
    """

    pages: Tensor | slice  # [n], or the range of pages that holds them
    tokens: Tensor  # [n * most]: the token of each input row; padding repeats a token
    most: int  # input rows per page
    start: int  # the tokens with adapters are in start:end
    end: int
    # [end - start] each: the results that a token adds; index n * most is a row of zeros
    result_rows: list[Tensor]
    aligned: bool  # there is one result per token, in the order of the tokens

    @staticmethod
    def of(groups: dict[int, np.ndarray]) -> _Batch | None:
        """groups: page → tokens"""
        if not groups:
            return None
        pages = sorted(groups)
        span = pages[-1] - pages[0] + 1
        # Computing a few unused pages costs less than copying the used ones together.
        whole = span <= 2 * len(pages)
        slots = range(pages[0], pages[-1] + 1) if whole else pages
        most = max(map(len, groups.values()))
        start = min(int(tokens[0]) for tokens in groups.values())
        end = max(int(tokens[-1]) for tokens in groups.values()) + 1
        tokens = np.full((len(slots), most), start)
        uses: list[list[int]] = [[] for _ in range(end - start)]
        for slot, page in enumerate(slots):
            for column, token in enumerate(groups.get(page, ())):
                tokens[slot, column] = token
                uses[token - start].append(slot * most + column)
        zero_row = tokens.size
        depth = max(map(len, uses))
        padded = np.array([use + [zero_row] * (depth - len(use)) for use in uses])
        aligned = depth == 1 and np.array_equal(padded[:, 0], np.arange(zero_row))
        return _Batch(
            slice(slots[0], slots[-1] + 1) if whole else torch.tensor(pages),
            torch.from_numpy(tokens.reshape(-1)),
            most,
            start,
            end,
            list(torch.from_numpy(padded).t().contiguous()),
            aligned,
        )

    def add(
        self, y: Tensor, x: Tensor, first: Tensor, second: Tensor, outputs: tuple[int, ...]
    ) -> None:
        first = first[self.pages]
        second = second[self.pages]
        inputs = x[self.tokens].to(first.dtype).view(-1, self.most, x.shape[1])
        middle = torch.bmm(inputs, first.transpose(1, 2))  # [n, most, parts * rank]
        rank = second.shape[1]
        column = 0
        for part, width in enumerate(outputs):
            part_middle = middle[:, :, part * rank : (part + 1) * rank]
            matrix = second[:, :, column : column + width]
            target = y[self.start : self.end, column : column + width]
            if self.aligned:
                target += torch.bmm(part_middle, matrix).flatten(0, 1)
            else:
                added = middle.new_empty(self.tokens.shape[0] + 1, width)
                added[-1] = 0
                torch.bmm(part_middle, matrix, out=added[:-1].view(-1, self.most, width))
                for rows in self.result_rows:
                    target += added.index_select(0, rows)
            column += width


def _as_slice(tokens: np.ndarray) -> Tensor | slice:
    """Return the tokens as a slice if they are contiguous."""
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)
