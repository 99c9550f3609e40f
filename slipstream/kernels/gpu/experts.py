"""A mixture of experts without host work: pairs of token and expert are sorted by expert on the
device and cut into tiles of one expert each, and a grouped GEMM runs over the tiles. The grid is
fixed, so that a CUDA graph can hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, pieces, power_of_two

_BLOCK = 1024
_LARGEST_TILE = 128
_FIXED_TILE = 64


@dataclass(slots=True)
class ExpertPlan:
    """All int32, on the device. Tiles beyond those in use have expert -1."""

    order: Tensor  # [pairs]: pairs by expert; pair = token × per_token + rank of the choice
    starts: Tensor  # [experts + 1]: index in `order` of an expert's first pair
    tile_expert: Tensor  # [tiles]
    tile_first: Tensor  # [tiles]: index in `order` of its first pair
    tile: int  # the most pairs of a tile


@CachedKernel
@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs(chosen, starts, order, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    place = 0
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found = tl.load(chosen + at, at < pairs, other=2**30)
        place += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + at, at < pairs, other=2**30) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - mine, at, mine > 0)
        place += tl.sum(mine, 0)


@CachedKernel
@triton.jit(do_not_specialize=["most"])
def _cut_tiles(
    starts,
    tile_expert,
    tile_first,
    most,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.arange(0, PADDED)
    first = tl.load(starts + expert, expert < EXPERTS, other=0)
    last = tl.load(starts + expert + 1, expert < EXPERTS, other=0)
    tiles = (last - first + TILE - 1) // TILE
    begin = tl.cumsum(tiles, 0) - tiles
    for number in range(tl.max(tiles, 0)):
        tl.store(tile_expert + begin + number, expert, number < tiles)
        tl.store(tile_first + begin + number, first + number * TILE, number < tiles)
    used = tl.sum(tiles, 0)
    for unused in range(0, most, BLOCK):
        at = unused + tl.arange(0, BLOCK)
        tl.store(tile_expert + at, -1, (at >= used) & (at < most))


@CachedKernel
@triton.jit
def _grouped_gemm(
    x,
    weight,
    scales,
    order,
    starts,
    tile_expert,
    tile_first,
    out,
    choices,
    outputs,
    inputs,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        place = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, TILE)
        held = place < tl.load(starts + expert + 1)
        pair = tl.load(order + place, held, other=0).to(tl.int64)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        real = row < outputs
        matrix = weight + expert * outputs * inputs
        total = tl.zeros([TILE, ROWS], tl.float32)
        for begin in tl.range(0, inputs, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < inputs
            a = tl.load(
                x + (pair // choices)[:, None] * inputs + column[None, :],
                held[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(
                matrix + row.to(tl.int64)[:, None] * inputs + column[None, :],
                real[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision=PRECISION)
        if SCALED:
            total *= tl.load(scales + expert * outputs + row, real, other=0.0)[None, :]
        tl.store(
            out + pair[:, None] * outputs + row[None, :],
            total.to(out.dtype.element_ty),
            held[:, None] & real[None, :],
        )


def plan_experts(chosen: Tensor, experts: int, fixed_tile: bool = False) -> ExpertPlan:
    """Sort the pairs of token and expert and cut them into tiles.

    chosen: [tokens, per_token]; fixed_tile: of one size, whatever the number of tokens
    """
    pairs = chosen.numel()
    tile = min(_LARGEST_TILE, max(16, power_of_two(pairs // experts)))
    if fixed_tile:
        tile = _FIXED_TILE
    # each expert in use has at most one tile that is not full
    most = pairs // tile + min(pairs, experts)
    order, starts, tile_expert, tile_first = (
        torch.empty(count, dtype=torch.int32, device=chosen.device)
        for count in (pairs, experts + 1, most, most)
    )
    _sort_pairs[(experts + 1,)](chosen, starts, order, pairs, BLOCK=_BLOCK, num_warps=4)
    _cut_tiles[(1,)](
        starts,
        tile_expert,
        tile_first,
        most,
        EXPERTS=experts,
        PADDED=power_of_two(experts),
        TILE=tile,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return ExpertPlan(order, starts, tile_expert, tile_first, tile)


def grouped_gemm(x: Tensor, weight: Tensor, scales: Tensor | None, plan: ExpertPlan) -> Tensor:
    """Return [pairs, out]: each pair's row times the weight of its expert.

    x: [tokens, in] or [pairs, in], weight: [experts, out, in], scales: [experts, out] of an 8-bit
    weight
    """
    _, outputs, inputs = weight.shape
    pairs = plan.order.shape[0]
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    rows = 128 if plan.tile >= 64 else 64
    exact = x.dtype == torch.float32
    _grouped_gemm[(pieces(outputs, rows), plan.tile_expert.shape[0])](
        x,
        weight,
        scales,
        plan.order,
        plan.starts,
        plan.tile_expert,
        plan.tile_first,
        out,
        pairs // x.shape[0],
        outputs,
        inputs,
        SCALED=scales is not None,
        TILE=plan.tile,
        ROWS=rows,
        COLUMNS=32 if exact else 64,
        PRECISION="ieee" if exact else "tf32",
        num_warps=8 if plan.tile >= 64 else 4,
        num_stages=2 if exact else 3,
    )
    return out
