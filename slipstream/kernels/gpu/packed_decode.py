"""Attention of rows with one new token each over a cache of twelve bits a number:
`decode_attention.py` with the head taken by its four runs, each with products of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.gpu.decode_chunks import arrive, in_sight, read_chunk, slots_of
from slipstream.kernels.gpu.launch import Quick, let_next, wait
from slipstream.kernels.gpu.packed_cache import UP, column, raw, read_words
from slipstream.kernels.gpu.softmax import soften


@Quick
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
    places,
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
    # The plan was there before the step: what it says is read while the kernel ahead runs out.
    head, row, table_row, start, end, length, part, first, parts = read_chunk(
        chunks, tl.program_id(0), KV_HEADS
    )
    table = tables + table_row.to(tl.int64) * table_stride
    # and no need to wait: another program of the grid does, and the grid is not over before
    if parts == 0:
        return
    query = tl.arange(0, QUERIES)
    mine = q + row.to(tl.int64) * q_stride + head * GROUP * SIZE
    wait(OVERLAP)
    room = 2 * tl.num_programs(0) <= places  # for the next kernel beside all programs of this one
    if room:
        let_next(OVERLAP)
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
    begin, oldest = in_sight(start, length, window, TILE, WINDOW, SINKS)
    for tile in tl.range(begin, end, TILE):
        seen, slot = slots_of(tile, end, oldest, sinks, table, TILE, BLOCK_TOKENS, WINDOW)
        x, y, z, key_scale = read_words(keys, head, cache_slots, slot, seen, RUN)
        k_0, k_1, k_2, k_3 = raw(x, y, z, ON_DEVICE)
        x, y, z, value_scale = read_words(values, head, cache_slots, slot, seen, RUN)
        v_0, v_1, v_2, v_3 = raw(x, y, z, ON_DEVICE)
        scores = tl.dot(q_0, tl.trans(k_0))
        scores = tl.dot(q_1, tl.trans(k_1), scores)
        scores = tl.dot(q_2, tl.trans(k_2), scores)
        scores = tl.dot(q_3, tl.trans(k_3), scores) * (key_scale * scale)[None, :]
        best, mass, weights, shrink = soften(scores, seen, best, mass, softcap, WINDOW, SOFTCAP)
        weights = (weights * value_scale[None, :]).to(v_0.dtype)
        total_0 = tl.dot(weights, v_0, total_0 * shrink[:, None])
        total_1 = tl.dot(weights, v_1, total_1 * shrink[:, None])
        total_2 = tl.dot(weights, v_2, total_2 * shrink[:, None])
        total_3 = tl.dot(weights, v_3, total_3 * shrink[:, None])
    result = (
        out + row.to(tl.int64) * GROUP * KV_HEADS * SIZE + (head * GROUP + query[:, None]) * SIZE
    )
    left = tl.interleave(total_0, total_1) * UP  # the head's two halves
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
            SIZE,
            QUERIES,
        )
    if not room:
        let_next(OVERLAP)


@triton.jit
def _queries(
    q, query, part: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ON_DEVICE: tl.constexpr
):
    """The columns of one run; zeros where a key head has fewer queries. Cached numbers are as much
    too small.
    """
    at = q + query[:, None] * SIZE + column(part, SIZE // 4)[None, :]
    numbers = tl.load(at, query[:, None] < GROUP, other=0.0).to(tl.float32) * UP
    return numbers.to(tl.bfloat16) if ON_DEVICE else numbers
