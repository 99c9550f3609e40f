"""RoPE: normalise and rotate queries and keys, and write keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.normalisation import rms_norm


def rotate_write(
    heads: Tensor,  # [tokens, q_heads + 2 * kv_heads, head_size]
    positions: Tensor,  # [tokens]
    slots: Tensor,  # [tokens]
    rope: tuple[Tensor, Tensor] | None,  # from `rope_at`: [tokens, 1, rotary_size] each
    q_norm: Tensor | None,  # [head_size]
    k_norm: Tensor | None,
    epsilon: float,
    keys: Tensor,  # [kv_heads, slots, head_size]
    values: Tensor,
) -> Tensor:
    """Return the queries [tokens, q_heads, head_size]."""
    kv_heads = keys.shape[0]
    q_heads = heads.shape[1] - 2 * kv_heads
    qk = heads[:, : q_heads + kv_heads]
    v = heads[:, q_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q = rms_norm(qk[:, :q_heads], q_norm, epsilon, heads.dtype)
        k = rms_norm(qk[:, q_heads:], k_norm, epsilon, heads.dtype)
        qk = torch.cat((q, k), dim=1)
    if rope is not None:
        qk = rotate(qk, *rope)
    keys.index_copy_(1, slots, qk[:, q_heads:].transpose(0, 1))
    values.index_copy_(1, slots, v.transpose(0, 1))
    return qk[:, :q_heads]


def rope_at(
    cosine: Tensor, signed_sine: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine at the positions of a step, for all of its layers.

    cosine, signed_sine: tables over all positions, float32 [positions, rotary_size] each
    """
    return cosine[positions][:, None].to(dtype), signed_sine[positions][:, None].to(dtype)


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_size] by cosine, signed_sine [tokens, 1, rotary_size].

    The first half of a head's rotary part pairs with the second. `signed_sine` is negative in its
    first half, so that a roll replaces the usual (-second, first). Columns beyond rotary_size are
    not rotated.
    """
    size = cosine.shape[-1]
    if size == x.shape[-1]:
        return torch.addcmul(x * cosine, x.roll(size // 2, -1), signed_sine)
    rotated = rotate(x[..., :size], cosine, signed_sine)
    return torch.cat((rotated, x[..., size:]), dim=-1)
