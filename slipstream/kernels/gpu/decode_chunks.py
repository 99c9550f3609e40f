"""Decode attention's schedule: rows with one new token each are cut into chunks, one per CTA, and
the partial results of a row's chunks are merged.

The longest chunks go first, so that the short ones fill the SMs at the end. The plan is in device
memory and the grid never changes, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import sm_count

_STEP = 64  # chunk sizes are multiples of this: the largest tile of a CTA
_CTAS_PER_SM = 5  # resident CTAs of several warps
_ONE_WARP_CTAS_PER_SM = 7  # resident CTAs of one warp, with heads of 128
# Minimum chunk size, as a multiple of (all tokens / resident CTAs). Starting and merging a chunk
# takes time; if there are many CTAs of one warp, others fill that time.
_MIN_SHARE = 1.3
_MIN_SHARE_OF_MANY = _CTAS_PER_SM / _ONE_WARP_CTAS_PER_SM
_QUICKLY_MERGED = 32  # chunks of a row that take little time to merge


class Chunk(NamedTuple):
    """The fields of a chunk, in their order in device memory: int32 each."""

    row: Any  # row of the step
    table_row: Any  # row of the block tables
    start: Any  # first token
    end: Any  # token behind the last
    length: Any  # tokens of the row
    part: Any  # index among the chunks of all rows that are cut
    first_part: Any  # `part` of the row's first chunk
    parts: Any  # chunks of the row; 0: nothing to do


CHUNK_FIELDS = len(Chunk._fields)
_FIELDS = tl.constexpr(CHUNK_FIELDS)
# offsets of the fields
_ROW, _TABLE_ROW, _START, _END, _LENGTH, _PART, _FIRST_PART, _PARTS = (
    tl.constexpr(index) for index in range(CHUNK_FIELDS)
)


@dataclass(slots=True)
class DecodePlan:
    """The result of `cut_chunks` on the device; rows of zeros behind it are nothing to do."""

    chunks: Tensor  # int32 [chunks, CHUNK_FIELDS]


@dataclass(frozen=True, slots=True)
class ResidentCtas:
    count: int  # CTAs of several warps that the device runs at once
    one_warp: bool = False  # whether CTAs may have one warp: many rows are then cut finer


def count_resident_ctas(device: torch.device, one_warp: bool = False) -> ResidentCtas:
    # the interpreter is treated as a device of four CTAs
    count = sm_count(device) * _CTAS_PER_SM if device.type == "cuda" else 4
    return ResidentCtas(count, one_warp)


def max_chunks(rows: int, kv_heads: int, resident: ResidentCtas) -> int:
    """Return the most chunks that `cut_chunks` makes."""
    most = rows + int(resident.count / (_least_share(rows * kv_heads, resident) * kv_heads))
    return min(rows * _max_chunks_of_row(kv_heads, resident), most)


def max_shared_chunks(items: int, rows: int, kv_heads: int, resident: ResidentCtas) -> int:
    """Return an upper bound on the chunks that need merging, over all KV heads.

    items: chunks over all KV heads
    """
    # A row that is cut has at most twice as many chunks as it has tokens per chunk's tokens.
    return min(items, int(2 * resident.count / _least_share(rows * kv_heads, resident)))


def _least_share(ctas: int, resident: ResidentCtas) -> float:
    many = resident.one_warp and 2 * ctas >= resident.count
    return _MIN_SHARE_OF_MANY if many else _MIN_SHARE


def _max_chunks_of_row(kv_heads: int, resident: ResidentCtas) -> int:
    """One CTA merges a row's chunks: as many as keep the device busy, and no more."""
    return max(_QUICKLY_MERGED, resident.count // (4 * kv_heads))


def cut_chunks(
    tables: np.ndarray, lengths: np.ndarray, kv_heads: int, resident: ResidentCtas
) -> np.ndarray:
    """Return int32 [chunks, CHUNK_FIELDS], the longest chunks first.

    tables: [rows], each row's row of the block tables; lengths: [rows]
    """
    size = _chunk_size(lengths, kv_heads, resident)
    counts = -(-lengths // size)
    cut = np.where(counts > 1, counts, 0)
    first_part = np.cumsum(cut) - cut
    row = np.repeat(np.arange(len(lengths)), counts)
    index = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]  # among the row's chunks
    start = index * size
    end = np.minimum(start + size, lengths[row])
    fields = Chunk(
        row=row,
        table_row=tables[row],
        start=start,
        end=end,
        length=lengths[row],
        part=first_part[row] + index,
        first_part=first_part[row],
        parts=counts[row],
    )
    return np.stack(fields, axis=1).astype(np.int32)[np.argsort(start - end, kind="stable")]


def _chunk_size(lengths: np.ndarray, kv_heads: int, resident: ResidentCtas) -> int:
    """Return the tokens of a chunk."""
    ctas = len(lengths) * kv_heads
    least = 4 * _STEP
    if 10 * ctas < resident.count:
        least = _STEP
    elif 5 * ctas < resident.count:
        least = 2 * _STEP
    share = _least_share(ctas, resident) * int(lengths.sum()) * kv_heads / resident.count
    of_longest = int(lengths.max(initial=0)) // _max_chunks_of_row(kv_heads, resident) + 1
    return -(-max(least, math.ceil(share), of_longest) // _STEP) * _STEP


@triton.jit
def read_chunk(chunks, item, KV_HEADS: tl.constexpr):
    """Return (kv_head, row, table_row, start, end, length, part, first_part, parts) of a CTA.

    `part` counts over all KV heads.
    """
    kv_head = item % KV_HEADS
    chunk = chunks + item // KV_HEADS * _FIELDS
    part = tl.load(chunk + _PART) * KV_HEADS + kv_head
    return (
        kv_head,
        tl.load(chunk + _ROW),
        tl.load(chunk + _TABLE_ROW),
        tl.load(chunk + _START),
        tl.load(chunk + _END),
        tl.load(chunk + _LENGTH),
        part,
        tl.load(chunk + _FIRST_PART),
        tl.load(chunk + _PARTS),
    )


@triton.jit
def visible_range(
    start,
    length,
    window,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Return where a chunk's tiles begin, and the oldest token within the window."""
    oldest = tl.maximum(length - window, 0)
    begin = start
    if WINDOW and not SINKS:
        begin = tl.maximum(start, oldest // TILE * TILE)
    return begin, oldest


@triton.jit
def visible_slots(
    tile,
    end,
    oldest,
    sinks,
    table,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return which tokens of a tile are attended to, and their cache slots."""
    token = tile + tl.arange(0, TILE)
    seen = token < end
    if WINDOW:
        seen = seen & ((token >= oldest) | (token < sinks))
    block = tl.load(table + token // BLOCK_TOKENS, seen, other=0).to(tl.int64)
    return seen, block * BLOCK_TOKENS + token % BLOCK_TOKENS


@triton.jit
def arrive(
    partial,
    statistics,
    arrivals,
    result,
    best,
    mass,
    part,
    first,
    parts,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Publish a chunk's partial result. The last CTA of a row and KV head merges all of them."""
    at = statistics + part * 2 * QUERIES + tl.arange(0, QUERIES)
    tl.store(at, best)
    tl.store(at + QUERIES, mass)
    tl.debug_barrier()  # every thread has stored its part before the counter is raised
    if tl.atomic_add(arrivals, 1) == parts - 1:
        tl.store(arrivals, 0)  # reset for the next layer
        _merge(
            partial,
            statistics,
            result,
            first,
            first + parts,
            kv_head,
            KV_HEADS,
            GROUP,
            SIZE,
            PADDED,
            QUERIES,
        )


@triton.jit
def _merge(
    partial,
    statistics,
    result,
    first,
    last,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Merge the chunks of one row and KV head, always in the same order. Other SMs may have written
    them, so that loads bypass L1.
    """
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    held = (query[:, None] < GROUP) & (column[None, :] < SIZE)
    for chunk in range(first, last):
        item = chunk * KV_HEADS + kv_head
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
