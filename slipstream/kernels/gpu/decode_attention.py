"""Attention of rows with one new token each, over the paged cache: equal pieces of work whatever the lengths.

The host cuts every row's cached tokens into chunks of one size, chosen so that chunks × key heads fill the
machine a few times over. A fixed number of programs takes chunks in turn; of a row with several, the one who is
done last merges them. The plan lies in device memory and the grid never changes, so a graph may hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.launch import Quick, counters, let_next, overlapping, power_of_two, wait

_TILE = 64  # cached tokens a program looks at at once
_PACKED_TILE = 128  # eight bits each: the same bytes
_WARPS, _STAGES = 4, 3
_FEW_ROWS = 8
_LARGE = (1024, 512, 256)  # tokens of a chunk
_MERGED = 32  # chunks that are soon merged
_GROUP = 16  # the least number of query rows the matrix units take
_SMALLEST = 16  # the least number of columns they sum over
_FEW_SHARES, _MANY_SHARES = 4, 12  # programs of a processor
_AT_ONCE = 2  # of them, what its memory holds
_LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(slots=True)
class DecodePlan:
    """All int32, on the device. Rows beyond those of the step have length 1 and the dummy row's table."""

    rows: Tensor  # [rows]: which table
    lengths: Tensor  # [rows]
    first_chunk: Tensor  # [rows + 1]
    chunk_row: Tensor  # [chunks]: index into the lists above
    chunk_start: Tensor  # [chunks]: first token
    sizes: Tensor  # [2]: chunks, tokens of a chunk


def most_chunks(rows: int, kv_heads: int, processors: int) -> int:
    """How many chunks `cut_chunks` makes at most."""
    shares = _programs(rows, kv_heads, processors) // kv_heads  # a chunk holds more than one of so many of all tokens
    return min(rows * _most_of_a_row(kv_heads, processors), rows + shares)


def _programs(rows: int, kv_heads: int, processors: int) -> int:
    """Lengths of many rows differ, and small shares even that out; what few rows leave to do nobody should wait for."""
    return processors * (_FEW_SHARES if rows * kv_heads <= _AT_ONCE * processors else _MANY_SHARES)


def _most_of_a_row(kv_heads: int, processors: int) -> int:
    """Chunks of a row, which one program merges: as many as it takes to keep the machine busy, and no more."""
    return max(_MERGED, processors // kv_heads)


def _unhurried(lengths: np.ndarray, kv_heads: int, processors: int) -> int:
    """The largest chunk of which there are enough to keep every processor at it. To begin one takes its time."""
    for size in _LARGE:
        if int((-(-lengths // size)).sum()) * kv_heads >= 0.95 * _AT_ONCE * processors:
            return size
    return _TILE if len(lengths) < _FEW_ROWS else 2 * _TILE


def cut_chunks(lengths: np.ndarray, kv_heads: int, processors: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """lengths: [rows] → first_chunk [rows + 1], chunk_row, chunk_start, and the tokens of a chunk."""
    total, longest = int(lengths.sum()) * kv_heads, int(lengths.max(initial=0))
    share = total // _programs(len(lengths), kv_heads, processors)
    size = max(share, longest // _most_of_a_row(kv_heads, processors)) + 1
    size = max(-(-size // _TILE) * _TILE, _unhurried(lengths, kv_heads, processors))
    chunks = -(-lengths // size)
    first = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(chunks, out=first[1:])
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), chunks)
    start = (np.arange(len(row), dtype=np.int32) - first[row]) * size
    return first, row, start, size


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
    q, keys, values, tables, rows, lengths, first_chunk, chunk_row, chunk_start, sizes, out, partial, statistics,
    arrivals, scale, softcap, q_stride, cache_slots, table_stride, window, sinks,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr, PACKED: tl.constexpr,
    ROOM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Packed, the cache is read as pairs of eight-bit numbers: even and odd columns of a head are then two halves of
    # half the width, each with its own products. Otherwise there is one "half", the whole head.
    STEP: tl.constexpr = 2 if PACKED else 1
    WIDTH: tl.constexpr = PADDED // STEP
    HALF: tl.constexpr = SIZE // STEP
    # The plan was there before the step: what it says of an item is read while the kernel ahead, or the item before,
    # runs out.
    items = tl.load(sizes) * KV_HEADS
    chunk_tokens = tl.load(sizes + 1)
    column = tl.arange(0, WIDTH)
    query = tl.arange(0, QUERIES)
    kind = out.dtype.element_ty
    index, start, length, row, first, last = _about(
        tl.program_id(0) // KV_HEADS, rows, lengths, first_chunk, chunk_row, chunk_start)
    wait(OVERLAP)
    if ROOM:  # for the next kernel beside all programs of this one
        let_next(OVERLAP)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        coming = tl.minimum(item + tl.num_programs(0), items - 1) // KV_HEADS
        next_index, next_start, next_length, next_row, next_first, next_last = _about(
            coming, rows, lengths, first_chunk, chunk_row, chunk_start)
        head = item % KV_HEADS
        table = tables + row.to(tl.int64) * table_stride
        end = tl.minimum(start + chunk_tokens, length)
        at = index.to(tl.int64) * q_stride + (head * GROUP + query[:, None]) * SIZE + STEP * column[None, :]
        held = (query[:, None] < GROUP) & (column[None, :] < HALF)
        queries = tl.load(q + at, held, other=0.0).to(COMPUTE)
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        total = tl.zeros([QUERIES, WIDTH], tl.float32)
        if PACKED:
            odd_queries = tl.load(q + at + 1, held, other=0.0).to(COMPUTE)
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
            where = slot[:, None] * HALF + column[None, :]
            loaded = seen[:, None] & (column[None, :] < HALF)
            if PACKED:
                k, odd_k = _unpack(tl.load(keys + where, loaded, other=0))
                v, odd_v = _unpack(tl.load(values + where, loaded, other=0))
                scores = tl.dot(odd_queries, tl.trans(odd_k), tl.dot(queries, tl.trans(k))) * scale
            else:
                k = tl.load(keys + where, loaded, other=0.0).to(COMPUTE)
                v = tl.load(values + where, loaded, other=0.0).to(COMPUTE)
                scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
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
        result = out + index.to(tl.int64) * GROUP * KV_HEADS * SIZE + (head * GROUP + query[:, None]) * SIZE
        if last - first == 1:
            tl.store(result + STEP * column[None, :], (total / mass[:, None]).to(kind), held)
            if PACKED:
                tl.store(result + 2 * column[None, :] + 1, (odd_total / mass[:, None]).to(kind), held)
        else:
            place = (item * QUERIES + query[:, None]) * PADDED + STEP * column[None, :]
            tl.store(partial + place, total)
            if PACKED:
                tl.store(partial + place + 1, odd_total)
            tl.store(statistics + item * 2 * QUERIES + query, best)
            tl.store(statistics + item * 2 * QUERIES + QUERIES + query, mass)
            tl.debug_barrier()  # every thread's part is stored before the arrival is told
            if tl.atomic_add(arrivals + index * KV_HEADS + head, 1) == last - first - 1:
                tl.store(arrivals + index * KV_HEADS + head, 0)  # for the next layer
                _merge(partial, statistics, result, first, last, head, KV_HEADS, GROUP, SIZE, PADDED, QUERIES)
        index, start, length = next_index, next_start, next_length
        row, first, last = next_row, next_first, next_last
    if not ROOM:
        let_next(OVERLAP)


@triton.jit
def _about(chunk, rows, lengths, first_chunk, chunk_row, chunk_start):
    """A chunk's row in the plan and its first token, then of that row: tokens, table, first chunk, and the one behind
    its last."""
    index = tl.load(chunk_row + chunk)
    first = tl.load(first_chunk + index)
    last = tl.load(first_chunk + index + 1)
    return index, tl.load(chunk_start + chunk), tl.load(lengths + index), tl.load(rows + index), first, last


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
    for chunk in range(first, last):
        item = chunk * KV_HEADS + head
        at = statistics + item * 2 * QUERIES + query
        chunk_best = tl.load(at, cache_modifier=".cg")
        chunk_mass = tl.load(at + QUERIES, cache_modifier=".cg")
        place = (item * QUERIES + query[:, None]) * PADDED + column[None, :]
        chunk_total = tl.load(partial + place, cache_modifier=".cg")
        top = tl.maximum(best, chunk_best)
        # A chunk wholly outside the window has no mass and a best of minus infinity.
        keep = tl.where(best == float("-inf"), 0.0, tl.exp2(best - top))
        add = tl.where(chunk_best == float("-inf"), 0.0, tl.exp2(chunk_best - top))
        total = total * keep[:, None] + chunk_total * add[:, None]
        mass = mass * keep + chunk_mass * add
        best = top
    held = (query[:, None] < GROUP) & (column[None, :] < SIZE)
    tl.store(result + column[None, :], (total / mass[:, None]).to(result.dtype.element_ty), held)


def attend_decode(
    q: Tensor,  # [rows, heads, head_size], rows may be strided
    keys: Tensor,  # [kv_heads, slots, head_size]
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: DecodePlan,
    block_tokens: int,
    processors: int,
    rule: AttentionRule,
    out: Tensor,  # [rows, heads, head_size], contiguous
) -> None:
    rows, heads, size = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    queries = max(_GROUP, power_of_two(group))
    padded = max(_SMALLEST, power_of_two(size))
    items = plan.chunk_row.shape[0] * kv_heads
    partial = torch.empty((items, queries, padded), dtype=torch.float32, device=q.device)
    statistics = torch.empty((items, 2, queries), dtype=torch.float32, device=q.device)
    shape = {"GROUP": group, "KV_HEADS": kv_heads, "SIZE": size, "PADDED": padded, "QUERIES": queries}
    shape |= overlapping(q.device)
    eight_bits = keys.dtype == torch.float8_e4m3fn
    # Each half of a head is a product of its own; the interpreter knows no instructions of the hardware.
    packed = eight_bits and size == padded >= 2 * _SMALLEST and q.is_cuda
    if packed:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    programs = min(_programs(rows, kv_heads, processors), items)
    _decode[(programs,)](
        q, keys, values, tables, plan.rows, plan.lengths, plan.first_chunk, plan.chunk_row, plan.chunk_start,
        plan.sizes, out, partial, statistics, counters(rows * kv_heads, q.device), rule.scale * _LOG2_E,
        rule.softcap * _LOG2_E, q.stride(0), keys.shape[1], tables.stride(0),
        rule.window if rule.window is not None else 2**30, rule.sinks,
        SOFTCAP=rule.softcap > 0, WINDOW=rule.window is not None, SINKS=rule.sinks > 0,
        # The hardware turns eight bits into float16 in one instruction; bfloat16 would take several.
        COMPUTE=tl.float16 if eight_bits else _TYPES[q.dtype], PACKED=packed, ROOM=programs <= _AT_ONCE * processors,
        BLOCK_TOKENS=block_tokens, TILE=_PACKED_TILE if packed else _TILE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=_WARPS, num_stages=_STAGES, **shape,
    )  # fmt: skip


def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
