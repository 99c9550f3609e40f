"""LoRA adapters on the GPU. The torch reference is `CpuStepAdapters` of kernels/adapters.py.

Two kernels per linear layer: `_shrink` computes the middle [tokens, pages, parts * rank] from x and
A, `_expand` adds B's share to y. Both run over tiles, which are tokens of one row. They read a
row's pages on the device, and the grid depends on the number of tiles alone. So a decode step,
whose tiles are its tokens, can be captured once for any adapters. Tiles without an adapter, and
pages that add nothing to the linear layer, end at once.

Tokens of a decode step share no adapter weights: the `_one` kernels read each adapter once, at
memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.adapters import AdapterPages
from slipstream.kernels.gpu.launch import (
    CachedKernel,
    overlapping,
    pieces,
    power_of_two,
    wait_and_trigger,
)

TILE_TOKENS = 64  # tokens of a prompt's tile
_SMALLEST = 16  # the smallest dimension of tl.dot
_INPUTS = 128  # columns of x and A that are loaded at once
_OUTPUTS = 128
_SPLITS = 4  # parts of the sum over inputs, if there are few tiles to keep the device busy
_MANY_TILES = 256
_HELD = 8192  # elements of A or B that a CTA of a decode step reads at once
_MAX_SPLITS = 16  # parts of the sum over inputs in a decode step


@CachedKernel
@triton.jit
def _shrink(
    x,
    memory,
    middle,
    starts,
    counts,
    rows,
    row_pages,
    linears,
    inputs,
    x_stride,
    page_stride,
    row_stride,
    split_stride,
    token_stride,
    first_at,
    LINEAR: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile = tl.program_id(0)
    number = tl.program_id(1)
    split = tl.program_id(2)
    table = row_pages + tl.load(rows + tile).to(tl.int64) * row_stride
    if number < tl.load(table):
        page = tl.load(table + 1 + number).to(tl.int64)
        if (tl.load(linears + page) >> LINEAR) & 1:
            token = tl.load(starts + tile) + tl.arange(0, TILE)
            inside = tl.arange(0, TILE) < tl.load(counts + tile)
            width = tl.arange(0, PADDED)
            total = tl.zeros([TILE, PADDED], tl.float32)
            share = tl.cdiv(inputs, INPUTS * SPLITS) * INPUTS
            for begin in range(split * share, min(inputs, (split + 1) * share), INPUTS):
                column = begin + tl.arange(0, INPUTS)
                held = column < inputs
                given = tl.load(
                    x + token.to(tl.int64)[:, None] * x_stride + column[None, :],
                    inside[:, None] & held[None, :],
                    other=0.0,
                )
                first = tl.load(
                    memory
                    + page * page_stride
                    + first_at
                    + width[None, :] * inputs
                    + column[:, None],
                    (width < WIDTH)[None, :] & held[:, None],
                    other=0.0,
                )
                total = tl.dot(given, first.to(given.dtype), total, input_precision="ieee")
            place = (
                middle
                + split * split_stride
                + token.to(tl.int64)[:, None] * token_stride
                + number * WIDTH
            )
            tl.store(place + width[None, :], total, inside[:, None] & (width < WIDTH)[None, :])


@CachedKernel
@triton.jit
def _expand(
    middle,
    memory,
    y,
    starts,
    counts,
    rows,
    row_pages,
    linears,
    outputs,
    y_stride,
    page_stride,
    row_stride,
    split_stride,
    token_stride,
    second_at,
    FIRST_PART: tl.constexpr,
    SECOND_PART: tl.constexpr,
    LINEAR: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    table = row_pages + tl.load(rows + tile).to(tl.int64) * row_stride
    pages = tl.load(table)
    if pages > 0:
        part, begin, end = _columns_of(block, outputs, FIRST_PART, SECOND_PART, OUTPUTS)
        column = begin + tl.arange(0, OUTPUTS)
        token = tl.load(starts + tile) + tl.arange(0, TILE)
        inside = tl.arange(0, TILE) < tl.load(counts + tile)
        rank = tl.arange(0, PADDED)
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        for number in range(pages):
            page = tl.load(table + 1 + number).to(tl.int64)
            if (tl.load(linears + page) >> LINEAR) & 1:
                given = tl.zeros([TILE, PADDED], tl.float32)
                at = (
                    middle
                    + token.to(tl.int64)[:, None] * token_stride
                    + (number * PARTS + part) * RANK
                )
                for split in tl.static_range(SPLITS):
                    given += tl.load(
                        at + split * split_stride + rank[None, :],
                        inside[:, None] & (rank < RANK)[None, :],
                        other=0.0,
                    )
                second = tl.load(
                    memory
                    + page * page_stride
                    + second_at
                    + rank[:, None] * outputs
                    + column[None, :],
                    (rank < RANK)[:, None] & (column < end)[None, :],
                    other=0.0,
                )
                total = tl.dot(given.to(second.dtype), second, total, input_precision="ieee")
        place = y + token.to(tl.int64)[:, None] * y_stride + column[None, :]
        held = inside[:, None] & (column < end)[None, :]
        before = tl.load(place, held, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(y.dtype.element_ty), held)


@CachedKernel
@triton.jit
def _shrink_one(
    x,
    memory,
    middle,
    rows,
    row_pages,
    linears,
    inputs,
    x_stride,
    page_stride,
    row_stride,
    split_stride,
    token_stride,
    first_at,
    LINEAR: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    table = row_pages + tl.load(rows + token).to(tl.int64) * row_stride
    width = tl.arange(0, PADDED)
    share = tl.cdiv(inputs, INPUTS * SPLITS) * INPUTS
    wait_and_trigger(OVERLAP)
    for number in range(tl.load(table)):
        page = tl.load(table + 1 + number).to(tl.int64)
        if (tl.load(linears + page) >> LINEAR) & 1:
            total = tl.zeros([PADDED], tl.float32)
            for begin in range(split * share, min(inputs, (split + 1) * share), INPUTS):
                column = begin + tl.arange(0, INPUTS)
                held = column < inputs
                first = tl.load(
                    memory
                    + page * page_stride
                    + first_at
                    + width[:, None] * inputs
                    + column[None, :],
                    (width < WIDTH)[:, None] & held[None, :],
                    other=0.0,
                )
                given = tl.load(x + token * x_stride + column, held, other=0.0)
                total += tl.sum(first.to(tl.float32) * given.to(tl.float32)[None, :], 1)
            place = middle + split * split_stride + token * token_stride + number * WIDTH
            tl.store(place + width, total, width < WIDTH)


@CachedKernel
@triton.jit
def _expand_one(
    middle,
    memory,
    y,
    rows,
    row_pages,
    linears,
    outputs,
    y_stride,
    page_stride,
    row_stride,
    split_stride,
    token_stride,
    second_at,
    FIRST_PART: tl.constexpr,
    SECOND_PART: tl.constexpr,
    LINEAR: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    table = row_pages + tl.load(rows + token).to(tl.int64) * row_stride
    pages = tl.load(table)
    part, begin, end = _columns_of(block, outputs, FIRST_PART, SECOND_PART, OUTPUTS)
    column = begin + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, PADDED)
    held = column < end
    place = memory + second_at + rank[:, None] * outputs + column[None, :]
    # The pages were written before the step: load B while the previous kernel finishes, or while
    # the previous page is added.
    page = tl.load(table + 1).to(tl.int64)
    # columns of B
    added = (pages > 0).to(tl.int32) * ((tl.load(linears + page) >> LINEAR) & 1) * RANK
    second = tl.load(place + page * page_stride, (rank < added)[:, None] & held[None, :], other=0.0)
    wait_and_trigger(OVERLAP)
    if pages > 0:
        total = tl.load(y + token * y_stride + column, held, other=0.0).to(tl.float32)
        for number in range(pages):
            page = tl.load(table + 1 + tl.minimum(number + 1, pages - 1)).to(tl.int64)
            next_added = (
                tl.where(number + 1 < pages, (tl.load(linears + page) >> LINEAR) & 1, 0) * RANK
            )
            next_second = tl.load(
                place + page * page_stride, (rank < next_added)[:, None] & held[None, :], other=0.0
            )
            given = tl.zeros([PADDED], tl.float32)
            at = middle + token * token_stride + (number * PARTS + part) * RANK + rank
            for split in tl.static_range(SPLITS):
                given += tl.load(at + split * split_stride, rank < added, other=0.0)
            # Rounded as `_expand` rounds it.
            given = given.to(second.dtype).to(tl.float32)
            total += tl.sum(given[:, None] * second.to(tl.float32), 0)
            second = next_second
            added = next_added
        tl.store(y + token * y_stride + column, total.to(y.dtype.element_ty), held)


@triton.jit
def _columns_of(
    block,
    outputs,
    FIRST_PART: tl.constexpr,
    SECOND_PART: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Return the part, first column and end of a block of columns. Each part is cut into blocks by
    itself.
    """
    first_blocks: tl.constexpr = (FIRST_PART + OUTPUTS - 1) // OUTPUTS
    second_blocks: tl.constexpr = (SECOND_PART + OUTPUTS - 1) // OUTPUTS
    part = (block >= first_blocks).to(tl.int32) + (block >= first_blocks + second_blocks).to(
        tl.int32
    )
    begin = tl.where(
        part == 0,
        block * OUTPUTS,
        tl.where(
            part == 1,
            FIRST_PART + (block - first_blocks) * OUTPUTS,
            FIRST_PART + SECOND_PART + (block - first_blocks - second_blocks) * OUTPUTS,
        ),
    )
    end = tl.where(part == 0, FIRST_PART, tl.where(part == 1, FIRST_PART + SECOND_PART, outputs))
    return part, begin, end


@dataclass(slots=True)
class Tiles:
    """Runs of tokens, each of one row of the step."""

    starts: Tensor  # int32 [tiles]: first token
    counts: Tensor  # int32 [tiles]: at most `tokens`
    rows: Tensor  # int32 [tiles]: row of the engine
    tokens: int  # the most tokens of a tile


def decode_tiles(rows: Tensor) -> Tiles:
    """Return a tile per token, for a step with one token per row. rows: int32 [tokens]"""
    starts = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return Tiles(starts, torch.ones_like(starts), rows, 1)


def cut_adapter_tiles(
    rows: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, counts and rows of tiles. rows, counts: of the step's rows, whose tokens
    follow each other
    """
    offsets = np.cumsum(counts) - counts
    tiles = -(-counts // TILE_TOKENS)
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    starts = np.repeat(offsets, tiles) + number * TILE_TOKENS
    return (
        starts,
        np.minimum(np.repeat(offsets + counts, tiles) - starts, TILE_TOKENS),
        np.repeat(rows, tiles),
    )


class GpuStepAdapters:
    def __init__(
        self,
        pages: AdapterPages,
        row_pages: Tensor,
        tiles: Tiles,
        batch_invariant: bool = False,
    ) -> None:
        """row_pages: int32 [rows of the engine, 1 + most pages]: the number of a row's pages, then
        the pages; batch_invariant: do not choose kernels by the number of tokens
        """
        self._batch_invariant = batch_invariant
        self._pages = pages
        self._row_pages = row_pages
        self._tiles = tiles

    def add(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        """y: [tokens, out], x: [tokens, in]; the last dimension of both is contiguous"""
        if self._tiles.tokens == 1:
            self._add_one(y, x, layer, linear)
        else:
            self._add_tiles(y, x, layer, linear)

    def _add_one(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        """Add the adapters of a decode step."""
        layout = self._pages.layout
        memory = self._pages.memory
        inputs, outputs = layout.shapes[linear]
        width = len(outputs) * layout.rank
        padded_width = power_of_two(width)
        input_columns = max(64, _HELD // padded_width)
        splits = min(_MAX_SPLITS, pieces(inputs, input_columns))
        middle = self._middle(splits, x, width)
        tables = (self._tiles.rows, self._row_pages, self._pages.device_linears)
        strides = self._strides(middle)
        first_at, second_at = layout.starts(layer, linear)
        tokens = self._tiles.starts.shape[0]
        _shrink_one[(tokens, splits)](
            x,
            memory,
            middle,
            *tables,
            inputs,
            x.stride(0),
            *strides,
            first_at,
            LINEAR=linear,
            WIDTH=width,
            PADDED=padded_width,
            INPUTS=input_columns,
            SPLITS=splits,
            num_warps=4,
            **overlapping(x.device),
        )
        output_columns = max(64, _HELD // power_of_two(layout.rank))
        _expand_one[(tokens, _blocks(outputs, output_columns))](
            middle,
            memory,
            y,
            *tables,
            sum(outputs),
            y.stride(0),
            *strides,
            second_at,
            **self._expand_constants(linear, splits),
            PADDED=power_of_two(layout.rank),
            OUTPUTS=output_columns,
            **overlapping(x.device),
        )

    def _add_tiles(self, y: Tensor, x: Tensor, layer: int, linear: int) -> None:
        """Add the adapters of a step with prompts."""
        layout = self._pages.layout
        memory = self._pages.memory
        tiles = self._tiles
        inputs, outputs = layout.shapes[linear]
        width = len(outputs) * layout.rank
        count = tiles.starts.shape[0]
        splits = 1 if count > _MANY_TILES or self._batch_invariant else _SPLITS
        tile = max(_SMALLEST, power_of_two(tiles.tokens))
        middle = self._middle(splits, x, width)
        spans = (tiles.starts, tiles.counts, tiles.rows)
        tables = (*spans, self._row_pages, self._pages.device_linears)
        strides = self._strides(middle)
        first_at, second_at = layout.starts(layer, linear)
        _shrink[(count, self._row_pages.shape[1] - 1, splits)](
            x,
            memory,
            middle,
            *tables,
            inputs,
            x.stride(0),
            *strides,
            first_at,
            LINEAR=linear,
            WIDTH=width,
            PADDED=_padded(width),
            TILE=tile,
            INPUTS=_INPUTS,
            SPLITS=splits,
            num_warps=4,
        )
        _expand[(count, _blocks(outputs, _OUTPUTS))](
            middle,
            memory,
            y,
            *tables,
            sum(outputs),
            y.stride(0),
            *strides,
            second_at,
            **self._expand_constants(linear, splits),
            PADDED=_padded(layout.rank),
            TILE=tile,
            OUTPUTS=_OUTPUTS,
        )

    def _strides(self, middle: Tensor) -> tuple[int, ...]:
        """Return the strides of pages, rows, splits and tokens."""
        page = self._pages.memory.stride(0)
        return (page, self._row_pages.stride(0), middle.stride(0), middle.stride(1))

    def _expand_constants(self, linear: int, splits: int) -> dict[str, int]:
        outputs = self._pages.layout.shapes[linear].outputs
        return {
            "FIRST_PART": outputs[0],
            "SECOND_PART": outputs[1] if len(outputs) > 1 else 0,
            "LINEAR": linear,
            "PARTS": len(outputs),
            "RANK": self._pages.layout.rank,
            "SPLITS": splits,
            "num_warps": 4,
        }

    def _middle(self, splits: int, x: Tensor, width: int) -> Tensor:
        """Return memory for A x: [splits of the sum, tokens, most pages * width]."""
        shape = (splits, x.shape[0], (self._row_pages.shape[1] - 1) * width)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def _blocks(outputs: tuple[int, ...], columns: int) -> int:
    """Return the number of blocks of columns, where each part is cut by itself."""
    return sum(pieces(width, columns) for width in outputs)


def _padded(count: int) -> int:
    return max(_SMALLEST, power_of_two(count))
