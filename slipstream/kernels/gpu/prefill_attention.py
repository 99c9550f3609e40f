"""Attention of rows with several new tokens each, over the paged cache that already holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.decode_attention import squeeze

QUERY_TILE = 128
_KEY_TILE = 64
_LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class PrefillPlan:
    """All int32, on the device; a tile is up to QUERY_TILE queries of one row."""

    tile_token: Tensor  # [tiles]: the step's token of the first query
    tile_position: Tensor  # [tiles]: its position
    tile_queries: Tensor  # [tiles]
    tile_row: Tensor  # [tiles]: which table


def cut_tiles(
    rows: np.ndarray, positions: np.ndarray, counts: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Columns of PrefillPlan for rows that compute counts[i] tokens from positions[i], at the step's offsets[i].

    Later tiles of a row look at more keys: they go first, so that the last programs to start are short.
    """
    tiles = -(-counts // QUERY_TILE)
    row = np.repeat(np.arange(len(counts)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = number * QUERY_TILE
    order = np.argsort(-(positions[row] + begin), kind="stable")
    row, begin = row[order], begin[order]
    queries = np.minimum(counts[row] - begin, QUERY_TILE)
    columns = (offsets[row] + begin, positions[row] + begin, queries, rows[row])
    return tuple(column.astype(np.int32) for column in columns)


@triton.jit
def _prefill(
    q, keys, values, tables, tile_token, tile_position, tile_queries, tile_row, out, scale, softcap,
    q_stride, out_stride, cache_slots, table_stride, window, sinks,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    head = tl.program_id(0)
    kv_head = (head // GROUP).to(tl.int64)
    token = tl.load(tile_token + tile).to(tl.int64)
    position = tl.load(tile_position + tile)
    count = tl.load(tile_queries + tile)
    table = tables + tl.load(tile_row + tile).to(tl.int64) * table_stride
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    held = (query[:, None] < count) & (column[None, :] < SIZE)
    queries = tl.load(q + (token + query[:, None]) * q_stride + head * SIZE + column[None, :], held, other=0.0)
    kind = q.dtype.element_ty
    asking = position + query  # positions of the queries
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    end = position + count
    begin = 0
    if not SINKS:
        begin = tl.maximum(position - window + 1, 0) // KEYS * KEYS
    for first in tl.range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        real = key < end
        block = tl.load(table + key // BLOCK_TOKENS, real, other=0).to(tl.int64)
        slot = kv_head * cache_slots + block * BLOCK_TOKENS + key % BLOCK_TOKENS
        where = slot[:, None] * SIZE + column[None, :]
        loaded = real[:, None] & (column[None, :] < SIZE)
        k = tl.load(keys + where, loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * squeeze(scores / softcap)
        near = key[None, :] > asking[:, None] - window
        if SINKS:
            near = near | (key[None, :] < sinks)
        seen = (key[None, :] <= asking[:, None]) & near
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)  # a query may see nothing of this tile yet
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        mass = mass * shrink + tl.sum(weights, 1)
        v = tl.load(values + where, loaded, other=0.0)
        total = total * shrink[:, None] + tl.dot(weights.to(kind), v, input_precision=PRECISION)
        best = top
    at = (token + query[:, None]) * out_stride + head * SIZE + column[None, :]
    tl.store(out + at, (total / mass[:, None]).to(kind), held)


def attend_prefill(
    q: Tensor,  # [tokens, heads, head_size], tokens may be strided
    keys: Tensor,  # [kv_heads, slots, head_size]
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: PrefillPlan,
    block_tokens: int,
    rule: AttentionRule,
    out: Tensor,  # [tokens, heads, head_size], contiguous
) -> None:
    _, heads, size = q.shape
    small = q.dtype == torch.float32 or size > 128  # what fits shared memory
    _prefill[(heads, plan.tile_token.shape[0])](
        q, keys, values, tables, plan.tile_token, plan.tile_position, plan.tile_queries, plan.tile_row, out,
        rule.scale * _LOG2_E, rule.softcap * _LOG2_E, q.stride(0), out.stride(0), keys.shape[1], tables.stride(0),
        rule.window if rule.window is not None else 2**30, rule.sinks,
        SOFTCAP=rule.softcap > 0, SINKS=rule.sinks > 0, GROUP=heads // keys.shape[0], SIZE=size,
        PADDED=triton.next_power_of_2(size), BLOCK_TOKENS=block_tokens, QUERIES=QUERY_TILE,
        KEYS=32 if small else _KEY_TILE, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if small else 4, num_stages=2 if small else 3,
    )  # fmt: skip
