"""The gated middle of the feed-forward part."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_gated(x, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    activated = tl.load(x + row * 2 * size + column, inside, other=0.0).to(tl.float32)
    multiplied = tl.load(x + row * 2 * size + size + column, inside, other=0.0)
    activated = (activated * tl.sigmoid(activated)).to(multiplied.dtype)  # rounded in between, as the twin does
    tl.store(out + row * size + column, activated * multiplied, inside)


def silu_gated(x: Tensor) -> Tensor:
    """x: [tokens, 2 * size], the activated half first → [tokens, size]."""
    tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, size))
    _silu_gated[(tokens, triton.cdiv(size, _BLOCK))](x, out, size, BLOCK=_BLOCK, num_warps=4)
    return out
