"""Attention of rows with one new token each, over the paged cache: as fast as memory, whatever the
mix of lengths.

A program takes one key head of one row. Rows too long for their share of the machine are cut into
chunks, and the program that is done last with a row merges them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import packed_cache
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.decode_chunks import (
    DecodePlan,
    Places,
    arrive,
    in_sight,
    read_chunk,
    shared_chunks,
    slots_of,
)
from slipstream.kernels.gpu.launch import Quick, counters, let_next, overlapping, power_of_two, wait
from slipstream.kernels.gpu.packed_decode import decode_packed
from slipstream.kernels.gpu.softmax import soften

_TILE = 64  # cached tokens a program looks at at once
_NARROW_TILE = 32  # the same of a program with one warp
# By the bytes of a cached number: programs for each that the machine holds from which on they are
# best narrow, and how far ahead of its arithmetic a narrow program reads.
_NARROW_FROM = {1: 1.5, 2: 2.3}
_NARROW_STAGES = {1: 6, 2: 4}
_GROUP = 16  # the least number of query rows the matrix units take
_SMALLEST = 16  # the least number of columns they sum over
_LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _split_pairs(pairs):
    """int16, two eight-bit numbers each → the low and the high ones as float16, by the hardware's
    conversion.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .b16 c, d, e, f; prmt.b32 a, $2, 0, 0x0020; prmt.b32 b, $2, 0, 0x0031;"
        " mov.b32 {c, e}, a; mov.b32 {d, f}, b; cvt.rn.f16x2.e4m3x2 $0, c; cvt.rn.f16x2.e4m3x2 $1, d; }",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@Quick
@triton.jit
def _decode(
    q,
    keys,
    values,
    tables,
    chunks,
    out,
    partial,
    statistics,
    arrivals,
    scale,
    softcap,
    q_stride,
    cache_slots,
    table_stride,
    window,
    sinks,
    places,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Paired, values are read as pairs of eight-bit numbers: even and odd columns of a head are then
    # two halves of half the width, each with its own product. Otherwise there is one "half", the
    # whole head.
    STEP: tl.constexpr = 2 if PAIRED else 1
    WIDTH: tl.constexpr = PADDED // STEP
    HALF: tl.constexpr = SIZE // STEP
    # The plan was there before the step: what it says is read while the kernel ahead runs out.
    head, row, table_row, start, end, length, part, first, parts = read_chunk(
        chunks, tl.program_id(0), KV_HEADS
    )
    table = tables + table_row.to(tl.int64) * table_stride
    # and no need to wait: another program of the grid does, and the grid is not over before
    if parts == 0:
        return
    column = tl.arange(0, PADDED)
    value_column = tl.arange(0, WIDTH)
    query = tl.arange(0, QUERIES)
    kind = out.dtype.element_ty
    at = row.to(tl.int64) * q_stride + (head * GROUP + query[:, None]) * SIZE + column[None, :]
    held = (query[:, None] < GROUP) & (value_column[None, :] < HALF)
    wait(OVERLAP)
    room = 2 * tl.num_programs(0) <= places  # for the next kernel beside all programs of this one
    if room:
        let_next(OVERLAP)
    queries = tl.load(q + at, (query[:, None] < GROUP) & (column[None, :] < SIZE), other=0.0).to(
        COMPUTE
    )
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    if PAIRED:
        odd_total = tl.zeros([QUERIES, WIDTH], tl.float32)
    begin, oldest = in_sight(start, length, window, TILE, WINDOW, SINKS)
    for tile in tl.range(begin, end, TILE):
        seen, slot = slots_of(tile, end, oldest, sinks, table, TILE, BLOCK_TOKENS, WINDOW)
        slot = head * cache_slots + slot
        k = tl.load(
            keys + slot[:, None] * SIZE + column[None, :],
            seen[:, None] & (column[None, :] < SIZE),
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(k.to(COMPUTE)), input_precision=PRECISION) * scale
        where = values + slot[:, None] * HALF + value_column[None, :]
        loaded = seen[:, None] & (value_column[None, :] < HALF)
        if PAIRED:
            v, odd_v = _split_pairs(tl.load(where, loaded, other=0))
        else:
            v = tl.load(where, loaded, other=0.0).to(COMPUTE)
        best, mass, weights, shrink = soften(scores, seen, best, mass, softcap, WINDOW, SOFTCAP)
        total = tl.dot(weights.to(COMPUTE), v, total * shrink[:, None], input_precision=PRECISION)
        if PAIRED:
            odd_total = tl.dot(weights.to(COMPUTE), odd_v, odd_total * shrink[:, None])
    result = (
        out + row.to(tl.int64) * GROUP * KV_HEADS * SIZE + (head * GROUP + query[:, None]) * SIZE
    )
    if parts == 1:
        tl.store(result + STEP * value_column[None, :], (total / mass[:, None]).to(kind), held)
        if PAIRED:
            tl.store(
                result + 2 * value_column[None, :] + 1, (odd_total / mass[:, None]).to(kind), held
            )
    else:
        place = partial + (part * QUERIES + query[:, None]) * PADDED + STEP * value_column[None, :]
        tl.store(place, total, held)
        if PAIRED:
            tl.store(place + 1, odd_total, held)
        arrive(
            partial,
            statistics,
            arrivals + row * KV_HEADS + head,
            result,
            best,
            mass,
            part,
            first,
            parts,
            head,
            KV_HEADS,
            GROUP,
            SIZE,
            PADDED,
            QUERIES,
        )
    if not room:
        let_next(OVERLAP)


def attend_decode(
    q: Tensor,  # [rows, heads, head_size], rows may be strided
    keys: Tensor,  # [kv_heads, slots, head_size], or packed
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: DecodePlan,
    block_tokens: int,
    places: Places,
    rule: AttentionRule,
    out: Tensor,  # [rows, heads, head_size], contiguous
) -> None:
    rows, heads, size = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    queries = max(_GROUP, power_of_two(group))
    padded = max(_SMALLEST, power_of_two(size))
    items = plan.chunks.shape[0] * kv_heads
    shared = shared_chunks(items, rows, kv_heads, places)
    partial = torch.empty((shared, queries, padded), dtype=torch.float32, device=q.device)
    statistics = torch.empty((shared, 2, queries), dtype=torch.float32, device=q.device)
    arguments = (
        q,
        keys,
        values,
        tables,
        plan.chunks,
        out,
        partial,
        statistics,
        counters(rows * kv_heads, q.device),
        rule.scale * _LOG2_E,
        rule.softcap * _LOG2_E,
        q.stride(0),
        keys.shape[1],
        tables.stride(0),
        rule.window if rule.window is not None else 2**30,
        rule.sinks,
        places.count,
    )
    constants: dict[str, Any] = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "BLOCK_TOKENS": block_tokens,
        "QUERIES": queries,
        "SOFTCAP": rule.softcap > 0,
        "WINDOW": rule.window is not None,
        "SINKS": rule.sinks > 0,
        **overlapping(q.device),
    }
    load = rows * kv_heads / places.count
    if keys.dtype == packed_cache.DTYPE:
        tuning = _packed_tuning(load, one_warp(group, size))
        decode_packed[(items,)](*arguments, **constants, **tuning, ON_DEVICE=q.is_cuda)
        return
    eight_bits = keys.dtype == torch.float8_e4m3fn
    # The interpreter knows no instructions of the hardware.
    paired = eight_bits and size == padded >= 2 * _SMALLEST and q.is_cuda
    if paired:
        values = values.view(torch.int16)
    # Wide or long numbers need the registers of several warps.
    small = q.element_size() == 2 and padded <= 128 and queries == _GROUP and paired == eight_bits
    _decode[(items,)](
        *arguments[:2],
        values,
        *arguments[3:],
        **constants,
        PADDED=padded,
        # The hardware turns eight bits into float16 in one instruction; bfloat16 would take
        # several.
        COMPUTE=tl.float16 if eight_bits else _TYPES[q.dtype],
        PAIRED=paired,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **_tuning(load, keys.element_size(), padded, small),
    )


def _tuning(load: float, number: int, padded: int, small: bool) -> dict[str, int]:
    """load: programs for each that the machine holds at once; number: bytes of a cached one"""
    if small and load >= _NARROW_FROM[number]:
        return {"TILE": _NARROW_TILE, "num_warps": 1, "num_stages": _NARROW_STAGES[number]}
    # Where there are few, each reads further ahead; where there is hardly any, it has no time to.
    stages = 3 if small and number == 2 and 0.25 <= load <= 1 else 2
    return {
        "TILE": _TILE if padded * number <= 512 else _TILE // 2,
        "num_warps": 4,
        "num_stages": stages,
    }


def one_warp(group: int, size: int) -> bool:
    """Whether the queries of a key head, over a packed cache, are few enough for the registers of
    one warp.
    """
    return max(_GROUP, power_of_two(group)) * size <= _GROUP * 128


def _packed_tuning(load: float, narrow: bool) -> dict[str, int]:
    if not narrow:
        return {"TILE": _NARROW_TILE, "num_warps": 4, "num_stages": 3}
    if load < 0.4:
        return {"TILE": _TILE, "num_warps": 2, "num_stages": 5}
    return {"TILE": _NARROW_TILE, "num_warps": 1, "num_stages": 5}
