"""Batch-invariant attention on the GPU: one kernel for prompts, their chunks and single tokens.
Switch: `KernelOptions.deterministic`.

All keys and values come from the cache, which holds the step's own tokens, too, in tiles that begin
at position 0. So a query adds the same tiles in the same order however its row is cut into steps,
and whatever other rows do. The price: a row is never divided among CTAs, which makes single tokens
with long contexts slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import packed_cache
from slipstream.kernels.attention_rule import AttentionRule
from slipstream.kernels.gpu.launch import CachedKernel, power_of_two
from slipstream.kernels.gpu.prefill_attention import LOG2_E, attend_tile, load_cached, plain_tuning
from slipstream.kernels.gpu.prefill_tiles import QUERY_TILE, PrefillPlan


@CachedKernel
@triton.jit
def _attend_cached(
    heads,
    keys,
    values,
    tables,
    tile_token,
    tile_position,
    tile_queries,
    tile_row,
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
    PACKED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    tile = tl.program_id(1)
    head = tl.program_id(0)
    kv_head = head // (Q_HEADS // KV_HEADS)
    token = tl.load(tile_token + tile)
    position = tl.load(tile_position + tile)
    count = tl.load(tile_queries + tile)
    table = tables + tl.load(tile_row + tile).to(tl.int64) * table_stride
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    held = (query[:, None] < count) & (column[None, :] < SIZE)
    kind = heads.dtype.element_ty
    at = (token + query).to(tl.int64)[:, None] * token_stride + head * SIZE + column[None, :]
    queries = tl.load(heads + at, held, other=0.0)
    query_position = position + query
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.where(sinks > 0, 0, tl.maximum(position - window + 1, 0)) // KEYS * KEYS
    # Every tile is masked, also if all queries attend to all of it: one form, one result.
    end = position + count
    for first in tl.range(begin, end, KEYS):
        k, v = load_cached(
            keys, values, table, first, end, kv_head, cache_slots,
            kind, SIZE, PADDED, BLOCK_TOKENS, KEYS, PACKED, ON_DEVICE,
        )  # fmt: skip
        key = first + tl.arange(0, KEYS)
        seen = key[None, :] <= query_position[:, None]
        if WINDOW:
            seen = seen & (
                (key[None, :] > query_position[:, None] - window) | (key[None, :] < sinks)
            )
        best, mass, total = attend_tile(
            queries, k, v, best, mass, total, seen, scale, softcap, True, SOFTCAP, PRECISION
        )
    place = (token + query).to(tl.int64)[:, None] * out_stride + head * SIZE + column[None, :]
    tl.store(out + place, (total / mass[:, None]).to(kind), held)


def attend_cached(
    # [tokens, q_heads + 2 * kv_heads, head_size], contiguous: rotated queries and keys, values
    heads: Tensor,
    keys: Tensor,  # [kv_heads, slots, head_size], or packed, with the step's own tokens
    values: Tensor,
    tables: Tensor,  # int32 [rows of the engine, blocks]
    plan: PrefillPlan,  # of all rows
    block_tokens: int,
    rule: AttentionRule,
    out: Tensor,  # [tokens, q_heads, head_size], contiguous
) -> None:
    """Write the attention of the queries of `plan` to `out`."""
    _, all_heads, size = heads.shape
    kv_heads = keys.shape[0]
    q_heads = all_heads - 2 * kv_heads
    packed = keys.dtype == packed_cache.DTYPE
    _attend_cached[(q_heads, plan.tile_token.shape[0])](
        heads,
        keys,
        values,
        tables,
        plan.tile_token,
        plan.tile_position,
        plan.tile_queries,
        plan.tile_row,
        out,
        rule.scale * LOG2_E,
        rule.softcap * LOG2_E,
        heads.stride(0),
        out.stride(0),
        keys.shape[1],
        tables.stride(0),
        rule.window if rule.window is not None else 2**30,
        rule.sinks,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        PADDED=max(16, power_of_two(size)),
        BLOCK_TOKENS=block_tokens,
        QUERIES=QUERY_TILE,
        PRECISION="ieee" if heads.dtype == torch.float32 else "tf32",
        SOFTCAP=rule.softcap > 0,
        WINDOW=rule.window is not None,
        PACKED=packed,
        ON_DEVICE=heads.is_cuda,
        **plain_tuning(heads.dtype, size, packed),
    )
