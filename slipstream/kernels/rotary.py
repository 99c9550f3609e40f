"""Rotary position embedding of queries and keys together."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """x: [tokens, heads, head_size]; cosine, signed_sine: [tokens, 1, rotary_size] → as x.

    The first half of a head's rotary part pairs with the second. `signed_sine` is negative in its first
    half, so that a roll stands in for the usual (-second, first). What lies beyond rotary_size passes as is.
    """
    size = cosine.shape[-1]
    if size == x.shape[-1]:
        return torch.addcmul(x * cosine, x.roll(size // 2, -1), signed_sine)
    turned = rotate(x[..., :size], cosine, signed_sine)
    return torch.cat((turned, x[..., size:]), dim=-1)
