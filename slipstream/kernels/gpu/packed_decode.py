"""Decode attention over a 12-bit KV cache: `decode_attention.py` with each head taken as its four
runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.decode_chunks import arrive, read_chunk, visible_range, visible_slots
from slipstream.kernels.gpu.launch import CachedKernel, trigger_next, wait
from slipstream.kernels.gpu.packed_cache import UP, column, raw, read_words
from slipstream.kernels.gpu.softmax import online_softmax_update


@CachedKernel
@triton.jit
def decode_packed(
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
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    RUN: tl.constexpr = SIZE // 4
    # The plan was written before the step: read it while the previous kernel finishes.
    kv_head, row, table_row, start, end, length, part, first, parts = read_chunk(
        chunks, tl.program_id(0), KV_HEADS
    )
    table = tables + table_row.to(tl.int64) * table_stride
    # An idle CTA may return at once: the grid ends only when its last CTA has waited.
    if parts == 0:
        return
    query = tl.arange(0, QUERIES)
    mine = q + row.to(tl.int64) * q_stride + kv_head * GROUP * SIZE
    wait(OVERLAP)
    # whether the next kernel fits beside all CTAs of this one
    room = 2 * tl.num_programs(0) <= resident
    if room:
        trigger_next(OVERLAP)
    q_0 = _queries(mine, query, 0, GROUP, SIZE, ON_DEVICE)
    q_1 = _queries(mine, query, 1, GROUP, SIZE, ON_DEVICE)
    q_2 = _queries(mine, query, 2, GROUP, SIZE, ON_DEVICE)
    q_3 = _queries(mine, query, 3, GROUP, SIZE, ON_DEVICE)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total_0 = tl.zeros([QUERIES, RUN], tl.float32)
    total_1 = tl.zeros([QUERIES, RUN], tl.float32)
    total_2 = tl.zeros([QUERIES, RUN], tl.float32)
    total_3 = tl.zeros([QUERIES, RUN], tl.float32)
    begin, oldest = visible_range(start, length, window, TILE, WINDOW, SINKS)
    for tile in tl.range(begin, end, TILE):
        seen, slot = visible_slots(tile, end, oldest, sinks, table, TILE, BLOCK_TOKENS, WINDOW)
        x, y, z, key_scale = read_words(keys, kv_head, cache_slots, slot, seen, RUN)
        k_0, k_1, k_2, k_3 = raw(x, y, z, ON_DEVICE)
        x, y, z, value_scale = read_words(values, kv_head, cache_slots, slot, seen, RUN)
        v_0, v_1, v_2, v_3 = raw(x, y, z, ON_DEVICE)
        scores = tl.dot(q_0, tl.trans(k_0))
        scores = tl.dot(q_1, tl.trans(k_1), scores)
        scores = tl.dot(q_2, tl.trans(k_2), scores)
        scores = tl.dot(q_3, tl.trans(k_3), scores) * (key_scale * scale)[None, :]
        best, mass, weights, shrink = online_softmax_update(
            scores, seen, best, mass, softcap, WINDOW, SOFTCAP
        )
        weights = (weights * value_scale[None, :]).to(v_0.dtype)
        total_0 = tl.dot(weights, v_0, total_0 * shrink[:, None])
        total_1 = tl.dot(weights, v_1, total_1 * shrink[:, None])
        total_2 = tl.dot(weights, v_2, total_2 * shrink[:, None])
        total_3 = tl.dot(weights, v_3, total_3 * shrink[:, None])
    result = (
        out + row.to(tl.int64) * GROUP * KV_HEADS * SIZE + (kv_head * GROUP + query[:, None]) * SIZE
    )
    left = tl.interleave(total_0, total_1) * UP  # first half of the head
    right = tl.interleave(total_2, total_3) * UP
    half = tl.arange(0, 2 * RUN)[None, :]
    held = query[:, None] < GROUP
    if parts == 1:
        kind = out.dtype.element_ty
        tl.store(result + half, (left / mass[:, None]).to(kind), held)
        tl.store(result + half + 2 * RUN, (right / mass[:, None]).to(kind), held)
    else:
        place = partial + (part * QUERIES + query[:, None]) * SIZE + half
        tl.store(place, left, held)
        tl.store(place + 2 * RUN, right, held)
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
            SIZE,
            QUERIES,
        )
    if not room:
        trigger_next(OVERLAP)


@triton.jit
def _queries(
    q,
    query,
    part: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Load the columns of one run; zeros where a KV head has fewer queries. Scaled by UP, because
    cached numbers are too small by that factor.
    """
    at = q + query[:, None] * SIZE + column(part, SIZE // 4)[None, :]
    numbers = tl.load(at, query[:, None] < GROUP, other=0.0).to(tl.float32) * UP
    return numbers.to(tl.bfloat16) if ON_DEVICE else numbers
