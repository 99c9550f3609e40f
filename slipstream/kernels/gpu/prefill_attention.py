"""Prefill attention: rows with several new tokens each, over the cached tokens and the step's own.

The step's own keys and values are read from the output of the QKV layer, not from the cache. There
they are contiguous, so that the copy engine (TMA) loads whole tiles, and they are exact even if the
cache holds fewer bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import packed_cache
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.launch import CachedKernel, power_of_two
from slipstream.kernels.gpu.packed_cache import read_whole
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan, query_tile, uses_descriptors
from slipstream.kernels.gpu.softmax import tanh

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(
    queries,
    k,
    v,
    best,
    mass,
    total,
    seen,
    scale,
    softcap,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys and values to the running softmax."""
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = softcap / scale * tanh(scores * (scale / softcap))
    if MASK:
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1) * scale)
    safe = top
    if MASK:
        safe = tl.where(
            top == float("-inf"), 0.0, top
        )  # a query may attend to nothing of this tile
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(best - safe)
    mass = mass * shrink + tl.sum(weights, 1)
    total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return top, mass, total


@triton.jit
def load_cached(
    keys,
    values,
    table,
    first,
    end,
    kv_head,
    cache_slots,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Load a tile of the row's cached keys and values from `first` on; zeros from `end` on."""
    column = tl.arange(0, PADDED)
    key = first + tl.arange(0, KEYS)
    real = key < end
    block = tl.load(table + key // BLOCK_TOKENS, real, other=0).to(tl.int64)
    slot = block * BLOCK_TOKENS + key % BLOCK_TOKENS
    if PACKED:
        k = read_whole(keys, kv_head, cache_slots, slot, real, KIND, SIZE // 4, ON_DEVICE)
        v = read_whole(values, kv_head, cache_slots, slot, real, KIND, SIZE // 4, ON_DEVICE)
    else:
        where = (kv_head.to(tl.int64) * cache_slots + slot)[:, None] * SIZE + column[None, :]
        loaded = real[:, None] & (column[None, :] < SIZE)
        k = tl.load(keys + where, loaded, other=0.0).to(KIND)
        v = tl.load(values + where, loaded, other=0.0).to(KIND)
    return k, v


@triton.jit
def _load_own(
    own,
    heads,
    first,
    kv_head,
    token_stride,
    end,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Load a tile of the step's own keys and values from its token `first`.

    A descriptor is for tiles that end before `end`. Other tiles have zeros from there on, because
    the next row may hold nan.
    """
    key_column = (Q_HEADS + kv_head) * SIZE
    value_column = (Q_HEADS + KV_HEADS + kv_head) * SIZE
    if DESCRIPTOR:
        k = own.load([first, key_column])
        v = own.load([first, value_column])
    else:
        column = tl.arange(0, PADDED)
        index = first + tl.arange(0, KEYS)
        where = heads + index.to(tl.int64)[:, None] * token_stride + column[None, :]
        loaded = (column[None, :] < SIZE) & (index[:, None] < end)
        k = tl.load(where + key_column, loaded, other=0.0)
        v = tl.load(where + value_column, loaded, other=0.0)
    return k, v


@triton.jit
def _attend_own(
    own,
    heads,
    first,
    start,
    cached,
    query_position,
    end,
    queries,
    best,
    mass,
    total,
    kv_head,
    token_stride,
    scale,
    softcap,
    window,
    sinks,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Add a tile of the row's own keys, from its new token `first`, with a mask: not every query
    attends to all of them.
    """
    k, v = _load_own(
        own,
        heads,
        start + first,
        kv_head,
        token_stride,
        end,
        Q_HEADS,
        KV_HEADS,
        SIZE,
        PADDED,
        KEYS,
        DESCRIPTOR,
    )
    key = cached + first + tl.arange(0, KEYS)
    seen = key[None, :] <= query_position[:, None]
    if WINDOW:
        seen = seen & ((key[None, :] > query_position[:, None] - window) | (key[None, :] < sinks))
    return attend_tile(
        queries, k, v, best, mass, total, seen, scale, softcap, True, SOFTCAP, PRECISION
    )


@CachedKernel
@triton.jit
def _prefill(
    own,
    heads,
    keys,
    values,
    tables,
    tile_token,
    tile_position,
    tile_queries,
    tile_row,
    tile_cached,
    out,
    scale,
    softcap,
    token_stride,
    out_stride,
    cache_slots,
    table_stride,
    window,
    sinks,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    PACKED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    tile = tl.program_id(1)
    head = tl.program_id(0)
    kv_head = head // (Q_HEADS // KV_HEADS)
    token = tl.load(tile_token + tile)
    position = tl.load(tile_position + tile)
    count = tl.load(tile_queries + tile)
    cached = tl.load(tile_cached + tile)
    table = tables + tl.load(tile_row + tile).to(tl.int64) * table_stride
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    held = (query[:, None] < count) & (column[None, :] < SIZE)
    kind = heads.dtype.element_ty
    at = (
        heads + (token + query).to(tl.int64)[:, None] * token_stride + head * SIZE + column[None, :]
    )
    queries = tl.load(at, held, other=0.0)
    query_position = position + query
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    oldest = 0
    if WINDOW:
        oldest = tl.where(sinks > 0, 0, tl.maximum(position - window + 1, 0))
    # Tokens cached before this step: every query comes after them. Whole tiles need no mask.
    begin = oldest // KEYS * KEYS
    if not WINDOW:
        for first in tl.range(0, cached // KEYS * KEYS, KEYS):
            k, v = load_cached(
                keys,
                values,
                table,
                first,
                cached,
                kv_head,
                cache_slots,
                kind,
                SIZE,
                PADDED,
                BLOCK_TOKENS,
                KEYS,
                PACKED,
                ON_DEVICE,
            )
            best, mass, total = attend_tile(
                queries, k, v, best, mass, total, held, scale, softcap, False, SOFTCAP, PRECISION
            )
        begin = cached // KEYS * KEYS
    for first in tl.range(begin, cached, KEYS):
        k, v = load_cached(
            keys,
            values,
            table,
            first,
            cached,
            kv_head,
            cache_slots,
            kind,
            SIZE,
            PADDED,
            BLOCK_TOKENS,
            KEYS,
            PACKED,
            ON_DEVICE,
        )
        key = first + tl.arange(0, KEYS)
        seen = tl.broadcast_to((key < cached)[None, :], [QUERIES, KEYS])
        if WINDOW:
            seen = seen & (
                (key[None, :] > query_position[:, None] - window) | (key[None, :] < sinks)
            )
        best, mass, total = attend_tile(
            queries, k, v, best, mass, total, seen, scale, softcap, True, SOFTCAP, PRECISION
        )
    # The step's own tokens: whole tiles before the first query, then tiles that only later queries
    # attend to.
    start = token - (position - cached)  # the step's token of the row's first new token
    own_begin = tl.maximum(oldest - cached, 0) // KEYS * KEYS
    if not WINDOW:
        own_begin = (position - cached) // KEYS * KEYS
        for first in tl.range(0, own_begin, KEYS):
            k, v = _load_own(
                own,
                heads,
                start + first,
                kv_head,
                token_stride,
                token + count,
                Q_HEADS,
                KV_HEADS,
                SIZE,
                PADDED,
                KEYS,
                DESCRIPTOR,
            )
            best, mass, total = attend_tile(
                queries, k, v, best, mass, total, held, scale, softcap, False, SOFTCAP, PRECISION
            )
    own_end = position - cached + count
    whole = own_end
    if DESCRIPTOR:
        whole = own_end // KEYS * KEYS
    for first in tl.range(own_begin, whole, KEYS):
        best, mass, total = _attend_own(
            own,
            heads,
            first,
            start,
            cached,
            query_position,
            token + count,
            queries,
            best,
            mass,
            total,
            kv_head,
            token_stride,
            scale,
            softcap,
            window,
            sinks,
            Q_HEADS,
            KV_HEADS,
            SIZE,
            PADDED,
            KEYS,
            WINDOW,
            SOFTCAP,
            PRECISION,
            DESCRIPTOR,
        )
    if whole < own_end:
        best, mass, total = _attend_own(
            own,
            heads,
            whole,
            start,
            cached,
            query_position,
            token + count,
            queries,
            best,
            mass,
            total,
            kv_head,
            token_stride,
            scale,
            softcap,
            window,
            sinks,
            Q_HEADS,
            KV_HEADS,
            SIZE,
            PADDED,
            KEYS,
            WINDOW,
            SOFTCAP,
            PRECISION,
            False,
        )
    at = (token + query).to(tl.int64)[:, None] * out_stride + head * SIZE + column[None, :]
    tl.store(out + at, (total / mass[:, None]).to(kind), held)


def attend_prefill(
    # [tokens, q_heads + 2 * kv_heads, head_size], contiguous: rotated queries and keys, values
    heads: Tensor,
    keys: Tensor,  # [kv_heads, slots, head_size], or packed
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: PrefillPlan,
    block_tokens: int,
    rule: AttentionRule,
    out: Tensor,  # [tokens, q_heads, head_size], contiguous
) -> None:
    """Write the attention of the queries of `plan` to `out`."""
    _, all_heads, size = heads.shape
    kv_heads = keys.shape[0]
    q_heads = all_heads - 2 * kv_heads
    packed = keys.dtype == packed_cache.DTYPE
    tuning = _tuning(heads.dtype, size, plan.large_tiles, packed)
    own = _own_descriptor(heads, tuning["KEYS"]) if tuning["DESCRIPTOR"] else heads
    tiles = (
        plan.tile_token,
        plan.tile_position,
        plan.tile_queries,
        plan.tile_row,
        plan.tile_cached,
    )
    scales = (rule.scale * LOG2_E, rule.softcap * LOG2_E)
    strides = (heads.stride(0), out.stride(0), keys.shape[1], tables.stride(0))
    window = rule.window if rule.window is not None else 2**30
    arguments = (own, heads, keys, values, tables, *tiles, out, *scales, *strides, window)
    _prefill[(q_heads, plan.tile_token.shape[0])](
        *arguments,
        rule.sinks,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        PADDED=max(16, power_of_two(size)),
        BLOCK_TOKENS=block_tokens,
        QUERIES=query_tile(plan.large_tiles),
        PRECISION="ieee" if heads.dtype == torch.float32 else "tf32",
        SOFTCAP=rule.softcap > 0,
        WINDOW=rule.window is not None,
        PACKED=packed,
        ON_DEVICE=heads.is_cuda,
        **tuning,
    )


def _own_descriptor(heads: Tensor, keys: int) -> Any:
    """Return a descriptor by which the copy engine loads tiles of `keys` tokens of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, all_heads, size = heads.shape
    return TensorDescriptor.from_tensor(heads.view(tokens, all_heads * size), [keys, size])


def _tuning(dtype: torch.dtype, size: int, large_tiles: bool, packed: bool) -> dict[str, Any]:
    if uses_descriptors(dtype, size):
        return {
            "KEYS": 128 if large_tiles else 32,
            "num_warps": 8 if large_tiles else 4,
            "num_stages": 3,
            "DESCRIPTOR": True,
        }
    return {**plain_tuning(dtype, size, packed), "DESCRIPTOR": False}


def plain_tuning(dtype: torch.dtype, size: int, packed: bool) -> dict[str, Any]:
    """Return the tuning of kernels that load tiles without the copy engine."""
    row_bytes = dtype.itemsize * power_of_two(size)  # bytes of a key
    tile_bytes = 2 ** (13 if packed else 14)  # packed words need room, too
    return {
        "KEYS": max(16, min(128 // dtype.itemsize, tile_bytes // row_bytes)),
        "num_warps": 4,
        "num_stages": 2 if row_bytes <= 512 else 1,
    }
