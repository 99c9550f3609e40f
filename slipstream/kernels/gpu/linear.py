"""The product of one token with a weight: a stream through the weight, spread over the whole machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # enough for every processor to have reads in flight
_COLUMNS = 512


@triton.jit
def _one_token(x, weight, bias, out, rows, size, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, size, COLUMNS, num_stages=4):
        column = begin + tl.arange(0, COLUMNS)
        held = column < size
        w = tl.load(weight + row.to(tl.int64)[:, None] * size + column[None, :], inside[:, None] & held[None, :],
                    other=0.0)
        total += w.to(tl.float32) * tl.load(x + column, held, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + row, inside, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


def one_token(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [1, in], weight: [out, in], bias: [out] or None → [1, out]"""
    rows, size = weight.shape
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    taken = min(32, max(2, triton.next_power_of_2(triton.cdiv(rows, _PROGRAMS) + 1) // 2))
    _one_token[(triton.cdiv(rows, taken),)](
        x, weight, bias, out, rows, size, BIAS=bias is not None, ROWS=taken, COLUMNS=_COLUMNS, num_warps=4
    )
    return out
