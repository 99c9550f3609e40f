"""How rows with one new token each are cut into chunks, one for a program, and how a row's chunks
are merged.

The longest chunks go first, so that the short ones fill what is left at the end. The plan lies in
device memory and the grid never changes, so a graph may hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import processors

_STEP = 64  # tokens that chunks end at a multiple of: the most that a program looks at at once
_AT_ONCE = 5  # programs of several warps that a processor holds
# Even shares of all tokens that a chunk holds at least: to begin and to merge one takes its time,
# which others fill where there are many, and narrow. Of those, with heads of 128, it holds seven.
_FULL, _FULL_OF_MANY = 1.3, _AT_ONCE / 7
_MERGED = 32  # chunks that are soon merged
CHUNK_NUMBERS = 8
_NUMBERS = tl.constexpr(CHUNK_NUMBERS)


@dataclass(slots=True)
class DecodePlan:
    """What `cut_chunks` gave, on the device; rows of zeros behind it are nothing to do."""

    chunks: Tensor  # int32 [chunks, CHUNK_NUMBERS]


@dataclass(frozen=True, slots=True)
class Places:
    count: int  # of programs that the machine holds at once
    # whether programs may have one warp: where there are many, rows are then cut finer
    narrow: bool = False


def places_of(device: torch.device, narrow: bool = False) -> Places:
    # 4: the interpreter
    return Places(processors(device) * _AT_ONCE if device.type == "cuda" else 4, narrow)


def most_chunks(rows: int, kv_heads: int, places: Places) -> int:
    """How many chunks `cut_chunks` makes at most."""
    most = rows + int(places.count / (_full(rows * kv_heads, places) * kv_heads))
    return min(rows * _most_of_a_row(kv_heads, places), most)


def shared_chunks(items: int, rows: int, kv_heads: int, places: Places) -> int:
    """How many of so many chunks, of all key heads, there are at most that have to be merged: a row
    that is cut has at most twice as many chunks as it has tokens over those of a chunk.
    """
    return min(items, int(2 * places.count / _full(rows * kv_heads, places)))


def _full(programs: int, places: Places) -> float:
    return _FULL_OF_MANY if places.narrow and 2 * programs >= places.count else _FULL


def _most_of_a_row(kv_heads: int, places: Places) -> int:
    """Chunks of a row, which one program merges: as many as it takes to keep the machine busy, and
    no more.
    """
    return max(_MERGED, places.count // (4 * kv_heads))


def cut_chunks(
    tables: np.ndarray, lengths: np.ndarray, kv_heads: int, places: Places
) -> np.ndarray:
    """tables: [rows], which one is whose; lengths: [rows] → int32 [chunks, CHUNK_NUMBERS], the
    longest first.

    The numbers of a chunk: the row of the step, its table, the first token and the one behind the
    last, the row's length, the chunk's place among those of all rows that are cut, that of the
    row's first, and how many the row has.
    """
    programs = len(lengths) * kv_heads
    least = _STEP * (1 if 10 * programs < places.count else 2 if 5 * programs < places.count else 4)
    share = _full(programs, places) * int(lengths.sum()) * kv_heads / places.count
    of_longest = int(lengths.max(initial=0)) // _most_of_a_row(kv_heads, places) + 1
    size = -(-max(least, math.ceil(share), of_longest) // _STEP) * _STEP
    counts = -(-lengths // size)
    cut = np.where(counts > 1, counts, 0)
    first = np.cumsum(cut) - cut
    row = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]  # of the row's chunks
    start = number * size
    end = np.minimum(start + size, lengths[row])
    numbers = (
        row,
        tables[row],
        start,
        end,
        lengths[row],
        first[row] + number,
        first[row],
        counts[row],
    )
    return np.stack(numbers, axis=1).astype(np.int32)[np.argsort(start - end, kind="stable")]


@triton.jit
def read_chunk(chunks, item, KV_HEADS: tl.constexpr):
    """→ a program's key head, and the numbers of its chunk, of which the sixth is its place among
    those of all heads
    """
    head = item % KV_HEADS
    chunk = chunks + item // KV_HEADS * _NUMBERS
    place = tl.load(chunk + 5) * KV_HEADS + head
    return (
        head,
        tl.load(chunk),
        tl.load(chunk + 1),
        tl.load(chunk + 2),
        tl.load(chunk + 3),
        tl.load(chunk + 4),
        place,
        tl.load(chunk + 6),
        tl.load(chunk + 7),
    )


@triton.jit
def in_sight(start, length, window, TILE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """→ where a chunk's tiles begin, and the oldest token within the window"""
    oldest = tl.maximum(length - window, 0)
    begin = start
    if WINDOW and not SINKS:
        begin = tl.maximum(start, oldest // TILE * TILE)
    return begin, oldest


@triton.jit
def slots_of(
    tile,
    end,
    oldest,
    sinks,
    table,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The tokens of a tile → which of them are seen, and their slots"""
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
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """A chunk's total is stored; who is the last of its row and head merges them all."""
    at = statistics + part * 2 * QUERIES + tl.arange(0, QUERIES)
    tl.store(at, best)
    tl.store(at + QUERIES, mass)
    tl.debug_barrier()  # every thread's part is stored before the arrival is told
    if tl.atomic_add(arrivals, 1) == parts - 1:
        tl.store(arrivals, 0)  # for the next layer
        _merge(
            partial,
            statistics,
            result,
            first,
            first + parts,
            head,
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
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The chunks of one row and head, always in the same order; other processors may have written
    them.
    """
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
