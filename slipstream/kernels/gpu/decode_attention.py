"""Decode attention over the paged cache: rows with one new token each, of any mix of lengths.

A CTA takes one KV head of one row. Rows too long for their share of the device are cut into chunks,
and the last CTA of a row merges them.
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
    ResidentCtas,
    arrive,
    max_shared_chunks,
    read_chunk,
    visible_range,
    visible_slots,
)
from slipstream.kernels.gpu.launch import (
    CachedKernel,
    counters,
    overlapping,
    power_of_two,
    trigger_next,
    wait,
)
from slipstream.kernels.gpu.packed_decode import decode_packed
from slipstream.kernels.gpu.softmax import online_softmax_update

_TILE = 64  # cached tokens that a CTA takes at once
_ONE_WARP_TILE = 32  # the same for a CTA of one warp
# By the bytes of a cached number: the load from which on CTAs of one warp are faster, in CTAs per
# resident CTA, and the stages of their loads.
_ONE_WARP_LOAD = {1: 1.5, 2: 2.3}
_ONE_WARP_STAGES = {1: 6, 2: 4}
_GROUP = 16  # the fewest query rows that tensor cores take
_SMALLEST = 16  # the fewest columns that they sum over
_LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _split_pairs(pairs):
    """Convert int16, two e4m3 numbers each, to the low and the high ones as float16, by the
    hardware's instruction.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .b16 c, d, e, f;"
        " prmt.b32 a, $2, 0, 0x0020; prmt.b32 b, $2, 0, 0x0031;"
        " mov.b32 {c, e}, a; mov.b32 {d, f}, b;"
        " cvt.rn.f16x2.e4m3x2 $0, c; cvt.rn.f16x2.e4m3x2 $1, d; }",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@CachedKernel
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
    resident,
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
    # PAIRED: values are read as pairs of 8-bit numbers. Even and odd columns of a head are then two
    # halves of half the width, each with its own dot. Otherwise there is one "half": the head.
    STEP: tl.constexpr = 2 if PAIRED else 1
    WIDTH: tl.constexpr = PADDED // STEP
    HALF: tl.constexpr = SIZE // STEP
    # The plan was written before the step: read it while the previous kernel finishes.
    kv_head, row, table_row, start, end, length, part, first, parts = read_chunk(
        chunks, tl.program_id(0), KV_HEADS
    )
    table = tables + table_row.to(tl.int64) * table_stride
    # An idle CTA may return at once: the grid ends only when its last CTA has waited.
    if parts == 0:
        return
    column = tl.arange(0, PADDED)
    value_column = tl.arange(0, WIDTH)
    query = tl.arange(0, QUERIES)
    kind = out.dtype.element_ty
    at = row.to(tl.int64) * q_stride + (kv_head * GROUP + query[:, None]) * SIZE + column[None, :]
    held = (query[:, None] < GROUP) & (value_column[None, :] < HALF)
    wait(OVERLAP)
    # whether the next kernel fits beside all CTAs of this one
    room = 2 * tl.num_programs(0) <= resident
    if room:
        trigger_next(OVERLAP)
    queries = tl.load(q + at, (query[:, None] < GROUP) & (column[None, :] < SIZE), other=0.0).to(
        COMPUTE
    )
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    if PAIRED:
        odd_total = tl.zeros([QUERIES, WIDTH], tl.float32)
    begin, oldest = visible_range(start, length, window, TILE, WINDOW, SINKS)
    for tile in tl.range(begin, end, TILE):
        seen, slot = visible_slots(tile, end, oldest, sinks, table, TILE, BLOCK_TOKENS, WINDOW)
        slot = kv_head * cache_slots + slot
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
        best, mass, weights, shrink = online_softmax_update(
            scores, seen, best, mass, softcap, WINDOW, SOFTCAP
        )
        total = tl.dot(weights.to(COMPUTE), v, total * shrink[:, None], input_precision=PRECISION)
        if PAIRED:
            odd_total = tl.dot(weights.to(COMPUTE), odd_v, odd_total * shrink[:, None])
    result = (
        out + row.to(tl.int64) * GROUP * KV_HEADS * SIZE + (kv_head * GROUP + query[:, None]) * SIZE
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
            arrivals + row * KV_HEADS + kv_head,
            result,
            best,
            mass,
            part,
            first,
            parts,
            kv_head,
            KV_HEADS,
            GROUP,
            SIZE,
            PADDED,
            QUERIES,
        )
    if not room:
        trigger_next(OVERLAP)


def attend_decode(
    q: Tensor,  # [rows, heads, head_size], rows may be strided
    keys: Tensor,  # [kv_heads, slots, head_size], or packed
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: DecodePlan,
    block_tokens: int,
    resident_ctas: ResidentCtas,
    rule: AttentionRule,
    out: Tensor,  # [rows, heads, head_size], contiguous
) -> None:
    """Write the attention of the rows' queries over the cache to `out`."""
    rows, heads, size = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    queries = max(_GROUP, power_of_two(group))
    padded = max(_SMALLEST, power_of_two(size))
    items = plan.chunks.shape[0] * kv_heads
    shared = max_shared_chunks(items, rows, kv_heads, resident_ctas)
    partial = torch.empty((shared, queries, padded), dtype=torch.float32, device=q.device)
    statistics = torch.empty((shared, 2, queries), dtype=torch.float32, device=q.device)
    memory = (tables, plan.chunks, out, partial, statistics, counters(rows * kv_heads, q.device))
    window = rule.window if rule.window is not None else 2**30
    strides = (q.stride(0), keys.shape[1], tables.stride(0))
    scales = (rule.scale * _LOG2_E, rule.softcap * _LOG2_E)
    arguments = (*memory, *scales, *strides, window, rule.sinks, resident_ctas.count)
    constants: dict[str, Any] = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "BLOCK_TOKENS": block_tokens,
        "QUERIES": queries,
        **_rule_constants(rule),
        **overlapping(q.device),
    }
    load = rows * kv_heads / resident_ctas.count
    if keys.dtype == packed_cache.DTYPE:
        constants |= _packed_tuning(load, fits_one_warp(group, size))
        decode_packed[(items,)](q, keys, values, *arguments, **constants, ON_DEVICE=q.is_cuda)
        return
    constants |= _unpacked_constants(q, keys, queries, padded, load)
    if constants["PAIRED"]:
        values = values.view(torch.int16)
    _decode[(items,)](q, keys, values, *arguments, **constants)


def _unpacked_constants(
    q: Tensor, keys: Tensor, queries: int, padded: int, load: float
) -> dict[str, Any]:
    """Return the constants of `_decode` that depend on the types of queries and cache."""
    fp8 = keys.dtype == torch.float8_e4m3fn
    # The interpreter has no inline assembly.
    paired = fp8 and q.shape[-1] == padded >= 2 * _SMALLEST and q.is_cuda
    # Larger types and heads need the registers of several warps.
    small = q.element_size() == 2 and padded <= 128 and queries == _GROUP and paired == fp8
    return {
        "PADDED": padded,
        # The hardware converts e4m3 to float16 in one instruction; bfloat16 would take several.
        "COMPUTE": tl.float16 if fp8 else _TYPES[q.dtype],
        "PAIRED": paired,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        **_tuning(load, keys.element_size(), padded, small),
    }


def _rule_constants(rule: AttentionRule) -> dict[str, Any]:
    return {
        "SOFTCAP": rule.softcap > 0,
        "WINDOW": rule.window is not None,
        "SINKS": rule.sinks > 0,
    }


def _tuning(load: float, number_bytes: int, padded: int, small: bool) -> dict[str, int]:
    """load: CTAs per resident CTA; number_bytes: bytes of a cached number"""
    if small and load >= _ONE_WARP_LOAD[number_bytes]:
        stages = _ONE_WARP_STAGES[number_bytes]
        return {"TILE": _ONE_WARP_TILE, "num_warps": 1, "num_stages": stages}
    # With few CTAs each reads further ahead; with hardly any tokens there is nothing to read ahead.
    stages = 3 if small and number_bytes == 2 and 0.25 <= load <= 1 else 2
    tile = _TILE if padded * number_bytes <= 512 else _TILE // 2
    return {"TILE": tile, "num_warps": 4, "num_stages": stages}


def fits_one_warp(group: int, size: int) -> bool:
    """Return whether the queries of a KV head fit into the registers of one warp, over a 12-bit
    cache. group: query heads per KV head
    """
    return max(_GROUP, power_of_two(group)) * size <= _GROUP * 128


def _packed_tuning(load: float, one_warp: bool) -> dict[str, int]:
    if not one_warp:
        return {"TILE": _ONE_WARP_TILE, "num_warps": 4, "num_stages": 3}
    if load < 0.4:
        return {"TILE": _TILE, "num_warps": 2, "num_stages": 5}
    return {"TILE": _ONE_WARP_TILE, "num_warps": 1, "num_stages": 5}
