"""RoPE: normalise and rotate queries and keys, and write keys and values to the cache, in one pass
over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import (
    CachedKernel,
    overlapping,
    pieces,
    power_of_two,
    wait_and_trigger,
)
from slipstream.kernels.gpu.packed_cache import pack, write
from slipstream.kernels.packed_cache import DTYPE

# heads of a CTA; fewer give it too little work, more leave too few CTAs for one token
_HEADS = 8


@CachedKernel
@triton.jit
def _rotate_write(
    heads,
    positions,
    slots,
    cosine,
    sine,
    q_weight,
    k_weight,
    keys,
    values,
    cache_slots,
    epsilon,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A head has two halves that are rotated into each other, and a rest that is not rotated.
    Either may be missing.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    real = head < Q_HEADS + 2 * KV_HEADS
    rotated = head < Q_HEADS + KV_HEADS  # queries and keys; values pass as they are
    base = heads + token * (Q_HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    kind = heads.dtype.element_ty
    # Only the heads come from the previous kernel: load the rest while it finishes.
    slot = tl.load(slots + token).to(tl.int64)
    square = tl.zeros([HEADS, 1], tl.float32)
    if HALF > 0:
        column = tl.arange(0, HALF_PADDED)[None, :]
        inside = column < HALF
        at = tl.load(positions + token) * (2 * HALF) + column
        first_cosine = tl.load(cosine + at, inside)
        second_cosine = tl.load(cosine + at + HALF, inside)
        first_sine = tl.load(sine + at, inside)
        second_sine = tl.load(sine + at + HALF, inside)
        if NORM:
            first_weight = _weight(q_weight, k_weight, column, head, inside, Q_HEADS)
            second_weight = _weight(q_weight, k_weight, column + HALF, head, inside, Q_HEADS)
    if REST > 0:
        rest_column = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
        rest_inside = rest_column < SIZE
        if NORM:
            rest_weight = _weight(q_weight, k_weight, rest_column, head, rest_inside, Q_HEADS)
    wait_and_trigger(OVERLAP)
    if HALF > 0:
        first = tl.load(base + column, real & inside, other=0.0)
        second = tl.load(base + column + HALF, real & inside, other=0.0)
    if REST > 0:
        rest = tl.load(base + rest_column, real & rest_inside, other=0.0)
    if NORM:
        if HALF > 0:
            square += tl.sum(first.to(tl.float32) * first.to(tl.float32), 1)[:, None]
            square += tl.sum(second.to(tl.float32) * second.to(tl.float32), 1)[:, None]
        if REST > 0:
            square += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)[:, None]
        scale = tl.rsqrt(square / SIZE + epsilon)
        if HALF > 0:
            first = tl.where(rotated, (first.to(tl.float32) * scale * first_weight).to(kind), first)
            second = tl.where(
                rotated, (second.to(tl.float32) * scale * second_weight).to(kind), second
            )
        if REST > 0:
            rest = tl.where(rotated, (rest.to(tl.float32) * scale * rest_weight).to(kind), rest)
    if HALF > 0:
        one = first.to(tl.float32)
        other = second.to(tl.float32)
        first = tl.where(rotated, (one * first_cosine + other * first_sine).to(kind), first)
        second = tl.where(rotated, (other * second_cosine + one * second_sine).to(kind), second)
        # With more threads than numbers, several threads read one: all must have read it by now.
        tl.debug_barrier()
        if PACKED:
            _write_packed(
                first,
                second,
                base,
                keys,
                values,
                slot,
                head,
                cache_slots,
                Q_HEADS,
                KV_HEADS,
                ON_DEVICE,
            )
        else:
            _write(
                first,
                base,
                keys,
                values,
                column,
                slot,
                head,
                real & inside,
                cache_slots,
                Q_HEADS,
                KV_HEADS,
                SIZE,
            )
            _write(
                second,
                base,
                keys,
                values,
                column + HALF,
                slot,
                head,
                real & inside,
                cache_slots,
                Q_HEADS,
                KV_HEADS,
                SIZE,
            )
    if REST > 0:
        _write(
            rest,
            base,
            keys,
            values,
            rest_column,
            slot,
            head,
            real & rest_inside,
            cache_slots,
            Q_HEADS,
            KV_HEADS,
            SIZE,
        )


@triton.jit
def _weight(q_weight, k_weight, column, head, inside, Q_HEADS: tl.constexpr):
    """Return the norm's weight: of queries, or of keys."""
    weight = tl.load(q_weight + column, inside & (head < Q_HEADS), other=0.0)
    return weight + tl.load(k_weight + column, inside & (head >= Q_HEADS), other=0.0)


@triton.jit
def _write(
    x,
    base,
    keys,
    values,
    column,
    slot,
    head,
    held,
    cache_slots,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Store columns of heads: queries and keys in place, keys and values to the cache."""
    is_value = head >= Q_HEADS + KV_HEADS
    tl.store(base + column, x, held & (head < Q_HEADS + KV_HEADS))
    key_at = ((head - Q_HEADS) * cache_slots + slot) * SIZE + column
    tl.store(
        keys + key_at,
        x.to(keys.dtype.element_ty),
        held & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS),
    )
    value_at = ((head - Q_HEADS - KV_HEADS) * cache_slots + slot) * SIZE + column
    tl.store(values + value_at, x.to(values.dtype.element_ty), held & is_value)


@triton.jit
def _write_packed(
    first,
    second,
    base,
    keys,
    values,
    slot,
    head,
    cache_slots,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Store whole heads, given as halves: queries and keys in place, keys and values to a 12-bit
    cache.
    """
    HALF: tl.constexpr = first.shape[1]
    column = tl.arange(0, HALF)[None, :]
    rotated = head < Q_HEADS + KV_HEADS
    tl.store(base + column, first, rotated)
    tl.store(base + column + HALF, second, rotated)
    if tl.max(head) >= Q_HEADS:  # other CTAs have queries only
        x, y, z, scale = pack(first, second, ON_DEVICE)
        key = head - Q_HEADS
        value = head - Q_HEADS - KV_HEADS
        write(keys, x, y, z, scale, key, slot, (key >= 0) & rotated, cache_slots)
        write(values, x, y, z, scale, value, slot, (value >= 0) & (value < KV_HEADS), cache_slots)


def rope_at(
    cosine: Tensor, signed_sine: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the tables unchanged: the kernel looks up positions itself."""
    return cosine, signed_sine


def rotate_write(
    # [tokens, q_heads + 2 * kv_heads, head_size]; queries and keys are changed in place
    heads: Tensor,
    positions: Tensor,  # [tokens]
    slots: Tensor,  # [tokens]
    # cosine and signed sine of every position: float32 [positions, rotary_size]
    rope: tuple[Tensor, Tensor] | None,
    q_norm: Tensor | None,  # [head_size]
    k_norm: Tensor | None,
    epsilon: float,
    keys: Tensor,  # [kv_heads, slots, head_size], or packed
    values: Tensor,
) -> Tensor:
    """Return heads, rotated: the input of attention."""
    tokens, all_heads, size = heads.shape
    kv_heads = keys.shape[0]
    q_heads = all_heads - 2 * kv_heads
    cosine, sine = rope if rope is not None else (heads, heads)
    half = cosine.shape[-1] // 2 if rope is not None else 0
    _rotate_write[(tokens, pieces(all_heads, _HEADS))](
        heads,
        positions,
        slots,
        cosine,
        sine,
        q_norm,
        k_norm,
        keys,
        values,
        keys.shape[1],
        epsilon,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        HALF=half,
        HALF_PADDED=power_of_two(max(1, half)),
        REST=size - 2 * half,
        REST_PADDED=power_of_two(max(1, size - 2 * half)),
        NORM=q_norm is not None,
        HEADS=_HEADS,
        PACKED=keys.dtype == DTYPE,
        ON_DEVICE=heads.is_cuda,
        num_warps=4,
        **overlapping(heads.device),
    )
    return heads
