"""Skinny GEMM: up to 64 tokens times a weight of 16, 12 or 8 bits. Bound by reading the weight,
which is read once.

A CTA takes a tile of the weight's rows. Where there are too few rows to keep every SM reading,
several CTAs share a tile's columns (split-K), and the last one adds up the parts, always in the
same order. With a gate, half of a tile's rows are those that the other half's results multiply.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.bf12 import GROUP, can_pack
from slipstream.kernels.gpu.activation import silu_times
from slipstream.kernels.gpu.bf12 import RUN, WORDS, unpacked
from slipstream.kernels.gpu.launch import (
    CachedKernel,
    counters,
    overlapping,
    pieces,
    power_of_two,
    prefetch,
    shared_memory,
    sm_count,
    wait_and_trigger,
)

_ROWS = 64  # rows of a tile: what the tensor cores take at once
_TILE_BYTES = 256  # bytes of a row in a tile
_MIN_CTAS = 64  # with deep load queues; more CTAs do not read faster
_MIN_SPLIT_CTAS = 300  # see `_leaves_sms_idle`
_MAX_COLUMNS = 8192  # columns of one CTA
# lines of 128 bytes per row that a CTA prefetches before it starts; prefetching takes time, too
_PREFETCHED_LINES = 2


@CachedKernel
@triton.jit(do_not_specialize=["tokens", "parts"])
def _skinny_gemm(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    partial,
    arrivals,
    tokens,
    rows,
    size,
    parts,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    X_SCALED: tl.constexpr,
    WEIGHT_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BF12: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    PRECISION: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    if GATED:
        HALF: tl.constexpr = ROWS // 2
        row = tile * HALF + tl.arange(0, ROWS) % HALF + tl.arange(0, ROWS) // HALF * (rows // 2)
    token = tl.arange(0, TOKENS)
    here = token < tokens
    span = tl.cdiv(tl.cdiv(size, COLUMNS), parts) * COLUMNS
    first = part * span
    last = tl.minimum(first + span, size)
    # While the previous kernel finishes, prefetch lines of 128 bytes of the weight's first tiles.
    if BF12:
        row_size = size // COLUMNS * WORDS
        line = tl.arange(0, LINES) * RUN + first // COLUMNS * WORDS
    else:
        row_size = size
        line = tl.arange(0, LINES) * (COLUMNS // 2) + first
    at = weight + row.to(tl.int64)[:, None] * row_size
    near = (
        tl.minimum(row, rows - 1).to(tl.int64)[:, None] * row_size
        + tl.minimum(line, row_size - 1)[None, :]
    )
    prefetch(weight + near, OVERLAP)
    wait_and_trigger(OVERLAP)
    kind = x.dtype.element_ty
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for begin in tl.range(first, last, COLUMNS, num_stages=STAGES):
        column = begin + tl.arange(0, COLUMNS)
        if BF12:
            word = at + (tl.arange(0, RUN) + begin // COLUMNS * WORDS)[None, :]
            y = x + token[None, :] * size + (begin + tl.arange(0, RUN))[:, None]
            runs = unpacked(
                tl.load(word),
                tl.load(word + RUN),
                tl.load(word + 2 * RUN),
                x.dtype.element_ty,
                ON_DEVICE,
            )
            for run in tl.static_range(4):
                z = tl.load(y + run * RUN, here[None, :], other=0.0)
                total = tl.dot(runs[run], z, total, input_precision=PRECISION)
        elif EVEN:
            w = tl.load(at + column[None, :])
            y = tl.load(x + token[None, :] * size + column[:, None], here[None, :], other=0.0)
            total = tl.dot(w.to(kind), y, total, input_precision=PRECISION)
        else:
            w = tl.load(
                at + column[None, :], (row < rows)[:, None] & (column < last)[None, :], other=0.0
            )
            held = here[None, :] & (column < last)[:, None]
            y = tl.load(x + token[None, :] * size + column[:, None], held, other=0.0)
            total = tl.dot(w.to(kind), y, total, input_precision=PRECISION)
    place = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
    done = True
    if SPLIT:
        tiles = tl.num_programs(0)
        tl.store(partial + (part * tiles + tile) * ROWS * TOKENS + place, total)
        tl.debug_barrier()  # every thread has stored its part before the counter is raised
        done = tl.atomic_add(arrivals + tile, 1) == parts - 1
        if done:
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for index in range(parts):
                total += tl.load(
                    partial + (index * tiles + tile) * ROWS * TOKENS + place, cache_modifier=".cg"
                )
            tl.store(arrivals + tile, 0)  # reset for the next GEMM
    if done:
        if WEIGHT_SCALED:
            total *= tl.load(weight_scales + row, row < rows, other=0.0)[:, None]
        if X_SCALED:
            total *= tl.load(x_scales + token, here, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + row, row < rows, other=0.0).to(tl.float32)[:, None]
        if GATED:
            halves = tl.permute(
                tl.reshape(total.to(out.dtype.element_ty), [2, HALF, TOKENS]), (1, 2, 0)
            )
            activated, multiplied = tl.split(halves)
            column = tile * HALF + tl.arange(0, HALF)
            where = out + token[None, :] * (rows // 2) + column[:, None]
            tl.store(where, silu_times(activated, multiplied), here[None, :])
        else:
            where = out + token[None, :] * rows + row[:, None]
            tl.store(where, total.to(out.dtype.element_ty), here[None, :] & (row < rows)[:, None])


def skinny_gemm(
    x: Tensor,  # [tokens, in], contiguous: 16 bits, or e4m3 with x_scales
    # [out, in]: of x's type, or int8 or e4m3 with weight_scales; or Bf12Weight's words with its
    # scales
    weight: Tensor,
    bias: Tensor | None,  # [out]
    x_scales: Tensor | None = None,  # float32 [tokens, 1]
    weight_scales: Tensor | None = None,  # float32 [out]
    out: Tensor | None = None,  # [tokens, out]
    gated: bool = False,  # return silu(first half of the results) × second half
) -> Tensor:
    """Return [tokens, out], 16 bits unless `out` is given; gated, [tokens, out / 2]."""
    tokens, size = x.shape
    rows = weight.shape[0]
    if out is None:
        dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
        out = x.new_empty((tokens, rows // 2 if gated else rows), dtype=dtype)
    width = max(16, power_of_two(tokens))
    tiling = _tiling(rows, size, width, x, weight)
    split_memory = _split_memory(x.device, tiling, width)
    _skinny_gemm[(tiling.tiles, tiling.parts)](
        x.contiguous(),
        x_scales,
        weight,
        weight_scales,
        bias,
        out,
        *split_memory,
        tokens,
        rows,
        size,
        tiling.parts,
        TOKENS=width,
        ROWS=_ROWS,
        COLUMNS=tiling.columns,
        SPLIT=tiling.parts > 1,
        STAGES=tiling.stages,
        EVEN=rows % _ROWS == 0 and size % tiling.columns == 0,
        X_SCALED=x_scales is not None,
        WEIGHT_SCALED=weight_scales is not None,
        BIAS=bias is not None,
        GATED=gated,
        BF12=weight.dtype == torch.int16,
        ON_DEVICE=x.device.type == "cuda",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        LINES=_PREFETCHED_LINES,
        num_warps=4,
        **overlapping(x.device),
    )
    return out


def supports_gate(weight: Tensor) -> bool:
    """Return whether the kernel can gate the halves of a weight [out, in]."""
    return weight.shape[0] % _ROWS == 0


def supports_bf12(weight: Tensor) -> bool:
    """Return whether the kernel takes a weight [out, in] in 12 bits."""
    return weight.shape[0] % _ROWS == 0 and can_pack(weight)


class _Tiling(NamedTuple):
    columns: int  # columns of a tile
    tiles: int
    parts: int  # CTAs that share a tile's columns
    stages: int  # tiles in flight


def _tiling(rows: int, size: int, width: int, x: Tensor, weight: Tensor) -> _Tiling:
    """width: tokens, padded"""
    bf12 = weight.dtype == torch.int16
    columns = GROUP if bf12 else _TILE_BYTES // weight.element_size()
    row_bytes = 2 * WORDS.value if bf12 else _TILE_BYTES
    tiles = pieces(rows, _ROWS)
    parts = 1
    while size / parts > 2 * columns and (
        size / parts > _MAX_COLUMNS or _leaves_sms_idle(tiles, parts, bf12)
    ):
        parts *= 2
    # Many CTAs keep the SMs busy by their number, few by the depth of their load queues.
    if bf12:
        stages = 3 if tiles * parts <= 2 * sm_count(x.device) else 2
    else:
        stages = 4 if tiles >= 256 or width > 32 else 6
    stage_bytes = _ROWS * row_bytes + width * columns * x.element_size()
    room = shared_memory(x.device) // stage_bytes
    return _Tiling(columns, tiles, parts, max(2, min(stages, room)))


def _leaves_sms_idle(tiles: int, parts: int, bf12: bool) -> bool:
    """Return whether this many CTAs leave SMs idle for longer than twice as many take to share the
    columns.
    """
    # Unpacking takes time, too; but the more CTAs share the columns, the less there is to gain.
    if bf12:
        return tiles * parts * parts < _MIN_SPLIT_CTAS
    return tiles * parts < _MIN_CTAS


def _split_memory(
    device: torch.device, tiling: _Tiling, width: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for the parts of a tile and for counters of the CTAs that have stored theirs;
    None where tiles are not split.
    """
    if tiling.parts == 1:
        return None, None
    size = tiling.parts * tiling.tiles * _ROWS * width
    return torch.empty(size, dtype=torch.float32, device=device), counters(tiling.tiles, device)
