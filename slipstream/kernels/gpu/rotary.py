"""Normalise and rotate queries and keys, and write keys and values to the cache, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import Quick, follow, overlapping, pieces, power_of_two

_HEADS = 8  # heads a program takes; fewer leave it too little to do, more too few programs for one token


@Quick
@triton.jit
def _rotate_write(
    heads, positions, slots, cosine, sine, q_weight, k_weight, keys, values, cache_slots, epsilon,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (column < SIZE)
    base = heads + token * (Q_HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    turned = head < Q_HEADS + KV_HEADS  # queries and keys; values pass as they are
    is_query = head < Q_HEADS
    kind = heads.dtype.element_ty
    HALF: tl.constexpr = ROTARY // 2
    # The kernel ahead makes the heads. All else was there before it: that comes while it runs out.
    slot = tl.load(slots + token).to(tl.int64)
    if ROTARY > 0:
        partner = tl.where(column < HALF, column + HALF, tl.where(column < ROTARY, column - HALF, column))
        position = tl.load(positions + token)
        rotary = (column < ROTARY) & (head >= 0)
        cos = tl.load(cosine + position * ROTARY + column, rotary, other=1.0)
        sin = tl.load(sine + position * ROTARY + column, rotary, other=0.0)
        if NORM:
            weight = tl.load(q_weight + column, inside & is_query, other=0.0)
            weight += tl.load(k_weight + column, inside & (turned & (head >= Q_HEADS)), other=0.0)
            partner_weight = tl.load(q_weight + partner, inside & is_query, other=0.0)
            partner_weight += tl.load(k_weight + partner, inside & (turned & (head >= Q_HEADS)), other=0.0)
    follow(OVERLAP)
    x = tl.load(base + column, inside, other=0.0)
    if ROTARY > 0:
        other = tl.load(base + partner, inside & turned, other=0.0)
        if NORM:
            x32 = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x32 * x32, 1) / SIZE + epsilon)[:, None]
            other = (other.to(tl.float32) * scale * partner_weight).to(kind)
            x = tl.where(turned, (x32 * scale * weight).to(kind), x)
        rotated = x.to(tl.float32) * cos + other.to(tl.float32) * sin
        x = tl.where(turned, rotated.to(kind), x)
        tl.debug_barrier()  # partners may be another warp's to overwrite: all are read by now
    tl.store(base + column, x, inside & turned)
    is_key = turned & (head >= Q_HEADS)
    key_at = ((head - Q_HEADS) * cache_slots + slot) * SIZE + column
    tl.store(keys + key_at, x.to(keys.dtype.element_ty), inside & is_key)
    value_at = ((head - Q_HEADS - KV_HEADS) * cache_slots + slot) * SIZE + column
    tl.store(values + value_at, x.to(values.dtype.element_ty), inside & (head >= Q_HEADS + KV_HEADS))


def turn_at(
    cosine: Tensor, signed_sine: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The tables as they are: the kernel looks positions up itself."""
    return cosine, signed_sine


def rotate_write(
    heads: Tensor,  # [tokens, q_heads + 2 * kv_heads, head_size]; queries and keys are changed in place
    positions: Tensor,  # [tokens]
    slots: Tensor,  # [tokens]
    turn: tuple[Tensor, Tensor] | None,  # cosine and signed sine of every position: float32 [positions, rotary_size]
    q_norm: Tensor | None,  # [head_size]
    k_norm: Tensor | None,
    epsilon: float,
    keys: Tensor,  # [kv_heads, slots, head_size]
    values: Tensor,
) -> Tensor:
    """→ heads, rotated: what attention takes"""
    tokens, all_heads, size = heads.shape
    kv_heads = keys.shape[0]
    q_heads = all_heads - 2 * kv_heads
    cosine, sine = turn if turn is not None else (heads, heads)
    _rotate_write[(tokens, pieces(all_heads, _HEADS))](
        heads, positions, slots, cosine, sine, q_norm, k_norm, keys, values, keys.shape[1], epsilon,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, SIZE=size, PADDED=power_of_two(size),
        ROTARY=cosine.shape[-1] if turn is not None else 0, NORM=q_norm is not None, HEADS=_HEADS, num_warps=4,
        **overlapping(heads.device),
    )  # fmt: skip
    return heads
