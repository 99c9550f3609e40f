"""Attention of rows with one new token each, over the paged cache: as fast as memory, whatever the mix of lengths.

A program takes one key head of one row. Rows too long for their share of the machine are cut into chunks, and the
program that is done last with a row merges them. The longest chunks go first, so that the short ones fill what is left
at the end. The plan lies in device memory and the grid never changes, so a graph may hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.launch import Quick, counters, let_next, overlapping, power_of_two, processors, wait

_TILE = 64  # cached tokens a program looks at at once
_NARROW_TILE = 32  # the same of a program with one warp
# By the bytes of a cached number: programs for each that the machine holds from which on they are best narrow, and how
# far ahead of its arithmetic a narrow program reads.
_NARROW_FROM = {1: 1.5, 2: 2.3}
_NARROW_STAGES = {1: 6, 2: 4}
_GROUP = 16  # the least number of query rows the matrix units take
_SMALLEST = 16  # the least number of columns they sum over
_AT_ONCE = 5  # programs that a processor holds
_FULL = 1.3  # even shares of all tokens that a chunk holds at least: to begin and to merge one takes its time
_MERGED = 32  # chunks that are soon merged
CHUNK_NUMBERS = 8
_NUMBERS = tl.constexpr(CHUNK_NUMBERS)
_LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(slots=True)
class DecodePlan:
    """What `cut_chunks` gave, on the device; rows of zeros behind it are nothing to do."""

    chunks: Tensor  # int32 [chunks, CHUNK_NUMBERS]


def places_of(device: torch.device) -> int:
    """How many programs the machine holds at once."""
    if device.type != "cuda":
        return 4  # the interpreter
    return processors(device) * _AT_ONCE


def most_chunks(rows: int, kv_heads: int, places: int) -> int:
    """How many chunks `cut_chunks` makes at most."""
    return min(rows * _most_of_a_row(kv_heads, places), rows + int(places / (_FULL * kv_heads)))


def _most_of_a_row(kv_heads: int, places: int) -> int:
    """Chunks of a row, which one program merges: as many as it takes to keep the machine busy, and no more."""
    return max(_MERGED, places // (4 * kv_heads))


def cut_chunks(tables: np.ndarray, lengths: np.ndarray, kv_heads: int, places: int) -> np.ndarray:
    """tables: [rows], which one is whose; lengths: [rows] → int32 [chunks, CHUNK_NUMBERS], the longest first.

    The numbers of a chunk: the row of the step, its table, the first token and the one behind the last, the row's
    length, the chunk's place among those of all rows that are cut, that of the row's first, and how many the row has.
    """
    programs = len(lengths) * kv_heads
    least = _TILE * (1 if 10 * programs < places else 2 if 5 * programs < places else 4)
    share = _FULL * int(lengths.sum()) * kv_heads / places
    of_longest = int(lengths.max(initial=0)) // _most_of_a_row(kv_heads, places) + 1
    size = -(-max(least, math.ceil(share), of_longest) // _TILE) * _TILE
    counts = -(-lengths // size)
    cut = np.where(counts > 1, counts, 0)
    first = np.cumsum(cut) - cut
    row = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]  # of the row's chunks
    start = number * size
    end = np.minimum(start + size, lengths[row])
    numbers = (row, tables[row], start, end, lengths[row], first[row] + number, first[row], counts[row])
    return np.stack(numbers, axis=1).astype(np.int32)[np.argsort(start - end, kind="stable")]


@triton.jit
def squeeze(x):
    """tanh, from the one power the hardware has; near zero, where that would cancel, from its series."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0))


@triton.jit
def _unpack(pairs):
    """int16, two eight-bit numbers each → the low and the high ones as float16, by the hardware's conversion."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .b16 c, d, e, f; prmt.b32 a, $2, 0, 0x0020; prmt.b32 b, $2, 0, 0x0031;"
        " mov.b32 {c, e}, a; mov.b32 {d, f}, b; cvt.rn.f16x2.e4m3x2 $0, c; cvt.rn.f16x2.e4m3x2 $1, d; }",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@Quick
@triton.jit
def _decode(
    q, keys, values, tables, chunks, out, partial, statistics, arrivals, scale, softcap, q_stride, cache_slots,
    table_stride, window, sinks,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr, PACKED: tl.constexpr,
    ROOM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Packed, values are read as pairs of eight-bit numbers: even and odd columns of a head are then two halves of half
    # the width, each with its own product. Otherwise there is one "half", the whole head.
    STEP: tl.constexpr = 2 if PACKED else 1
    WIDTH: tl.constexpr = PADDED // STEP
    HALF: tl.constexpr = SIZE // STEP
    # The plan was there before the step: what it says is read while the kernel ahead runs out.
    item = tl.program_id(0)
    head = item % KV_HEADS
    chunk = chunks + item // KV_HEADS * _NUMBERS
    row = tl.load(chunk)
    table = tables + tl.load(chunk + 1).to(tl.int64) * table_stride
    start = tl.load(chunk + 2)
    end = tl.load(chunk + 3)
    length = tl.load(chunk + 4)
    part = tl.load(chunk + 5) * KV_HEADS + head
    first = tl.load(chunk + 6)
    parts = tl.load(chunk + 7)
    if parts == 0:  # and no need to wait: another program of the grid does, and the grid is not over before
        return
    column = tl.arange(0, PADDED)
    value_column = tl.arange(0, WIDTH)
    query = tl.arange(0, QUERIES)
    kind = out.dtype.element_ty
    at = row.to(tl.int64) * q_stride + (head * GROUP + query[:, None]) * SIZE + column[None, :]
    held = (query[:, None] < GROUP) & (value_column[None, :] < HALF)
    wait(OVERLAP)
    if ROOM:  # for the next kernel beside all programs of this one
        let_next(OVERLAP)
    queries = tl.load(q + at, (query[:, None] < GROUP) & (column[None, :] < SIZE), other=0.0).to(COMPUTE)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    if PACKED:
        odd_total = tl.zeros([QUERIES, WIDTH], tl.float32)
    begin = start
    oldest = tl.maximum(length - window, 0)
    if WINDOW and not SINKS:
        begin = tl.maximum(start, oldest // TILE * TILE)
    for tile in tl.range(begin, end, TILE):
        token = tile + tl.arange(0, TILE)
        seen = token < end
        if WINDOW:
            seen = seen & ((token >= oldest) | (token < sinks))
        block = tl.load(table + token // BLOCK_TOKENS, seen, other=0).to(tl.int64)
        slot = head * cache_slots + block * BLOCK_TOKENS + token % BLOCK_TOKENS
        k = tl.load(keys + slot[:, None] * SIZE + column[None, :], seen[:, None] & (column[None, :] < SIZE), other=0.0)
        scores = tl.dot(queries, tl.trans(k.to(COMPUTE)), input_precision=PRECISION) * scale
        where = values + slot[:, None] * HALF + value_column[None, :]
        loaded = seen[:, None] & (value_column[None, :] < HALF)
        if PACKED:
            v, odd_v = _unpack(tl.load(where, loaded, other=0))
        else:
            v = tl.load(where, loaded, other=0.0).to(COMPUTE)
        if SOFTCAP:
            scores = softcap * squeeze(scores / softcap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        safe = top
        if WINDOW:
            safe = tl.where(top == float("-inf"), 0.0, top)  # nothing of the chunk may be in sight yet
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        mass = mass * shrink + tl.sum(weights, 1)
        total = tl.dot(weights.to(COMPUTE), v, total * shrink[:, None], input_precision=PRECISION)
        if PACKED:
            odd_total = tl.dot(weights.to(COMPUTE), odd_v, odd_total * shrink[:, None])
        best = top
    result = out + row.to(tl.int64) * GROUP * KV_HEADS * SIZE + (head * GROUP + query[:, None]) * SIZE
    if parts == 1:
        tl.store(result + STEP * value_column[None, :], (total / mass[:, None]).to(kind), held)
        if PACKED:
            tl.store(result + 2 * value_column[None, :] + 1, (odd_total / mass[:, None]).to(kind), held)
    else:
        place = partial + (part * QUERIES + query[:, None]) * PADDED + STEP * value_column[None, :]
        tl.store(place, total, held)
        if PACKED:
            tl.store(place + 1, odd_total, held)
        _arrive(partial, statistics, arrivals + row * KV_HEADS + head, result, best, mass, part, first, parts, head,
                KV_HEADS, GROUP, SIZE, PADDED, QUERIES)
    if not ROOM:
        let_next(OVERLAP)


@triton.jit
def _arrive(
    partial, statistics, arrivals, result, best, mass, part, first, parts, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """A chunk's total is stored; who is the last of its row and head merges them all."""
    at = statistics + part * 2 * QUERIES + tl.arange(0, QUERIES)
    tl.store(at, best)
    tl.store(at + QUERIES, mass)
    tl.debug_barrier()  # every thread's part is stored before the arrival is told
    if tl.atomic_add(arrivals, 1) == parts - 1:
        tl.store(arrivals, 0)  # for the next layer
        _merge(partial, statistics, result, first, first + parts, head, KV_HEADS, GROUP, SIZE, PADDED, QUERIES)


@triton.jit
def _merge(
    partial, statistics, result, first, last, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The chunks of one row and head, always in the same order; other processors may have written them."""
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    held = (query[:, None] < GROUP) & (column[None, :] < SIZE)
    for chunk in range(first, last):
        item = chunk * KV_HEADS + head
        at = statistics + item * 2 * QUERIES + query
        chunk_best = tl.load(at, cache_modifier=".cg")
        chunk_mass = tl.load(at + QUERIES, cache_modifier=".cg")
        place = (item * QUERIES + query[:, None]) * PADDED + column[None, :]
        chunk_total = tl.load(partial + place, held, other=0.0, cache_modifier=".cg")
        top = tl.maximum(best, chunk_best)
        # A chunk wholly outside the window has no mass and a best of minus infinity.
        keep = tl.where(best == float("-inf"), 0.0, tl.exp2(best - top))
        add = tl.where(chunk_best == float("-inf"), 0.0, tl.exp2(chunk_best - top))
        total = total * keep[:, None] + chunk_total * add[:, None]
        mass = mass * keep + chunk_mass * add
        best = top
    tl.store(result + column[None, :], (total / mass[:, None]).to(result.dtype.element_ty), held)


def attend_decode(
    q: Tensor,  # [rows, heads, head_size], rows may be strided
    keys: Tensor,  # [kv_heads, slots, head_size]
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: DecodePlan,
    block_tokens: int,
    places: int,  # what `places_of` says
    rule: AttentionRule,
    out: Tensor,  # [rows, heads, head_size], contiguous
) -> None:
    rows, heads, size = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    queries = max(_GROUP, power_of_two(group))
    padded = max(_SMALLEST, power_of_two(size))
    items = plan.chunks.shape[0] * kv_heads
    # A row that is cut has at most twice as many chunks as it has tokens over those of a chunk.
    shared = min(items, int(2 * places / _FULL))
    partial = torch.empty((shared, queries, padded), dtype=torch.float32, device=q.device)
    statistics = torch.empty((shared, 2, queries), dtype=torch.float32, device=q.device)
    shape = {"GROUP": group, "KV_HEADS": kv_heads, "SIZE": size, "PADDED": padded, "QUERIES": queries}
    shape |= overlapping(q.device)
    eight_bits = keys.dtype == torch.float8_e4m3fn
    # The interpreter knows no instructions of the hardware.
    packed = eight_bits and size == padded >= 2 * _SMALLEST and q.is_cuda
    if packed:
        values = values.view(torch.int16)
    # Wide or long numbers need the registers of several warps.
    small = q.element_size() == 2 and padded <= 128 and queries == _GROUP and packed == eight_bits
    programs, number = rows * kv_heads, keys.element_size()
    if small and programs >= _NARROW_FROM[number] * places:
        tile, warps, stages = _NARROW_TILE, 1, _NARROW_STAGES[number]
    else:  # where there are few, each reads further ahead; where there is hardly any, it has no time to
        tile, warps = _TILE if padded * number <= 512 else _TILE // 2, 4
        stages = 3 if small and number == 2 and places <= 4 * programs <= 4 * places else 2
    _decode[(items,)](
        q, keys, values, tables, plan.chunks, out, partial, statistics, counters(rows * kv_heads, q.device),
        rule.scale * _LOG2_E, rule.softcap * _LOG2_E, q.stride(0), keys.shape[1], tables.stride(0),
        rule.window if rule.window is not None else 2**30, rule.sinks,
        SOFTCAP=rule.softcap > 0, WINDOW=rule.window is not None, SINKS=rule.sinks > 0,
        # The hardware turns eight bits into float16 in one instruction; bfloat16 would take several.
        COMPUTE=tl.float16 if eight_bits else _TYPES[q.dtype], PACKED=packed, ROOM=2 * items <= places,
        BLOCK_TOKENS=block_tokens, TILE=tile,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages, **shape,
    )  # fmt: skip
