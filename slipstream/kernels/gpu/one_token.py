"""The product of one token with a weight: a stream through the weight, spread over the whole machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import Quick, follow, overlapping, pieces, power_of_two

_PROGRAMS = 512  # enough for every processor to have reads in flight
_COLUMNS = 512
_MOST_ROWS = 16  # of a program: what registers hold


@Quick
@triton.jit
def _one_token(
    x, weight, bias, out, rows, size,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = weight + row.to(tl.int64)[:, None] * size
    column = tl.arange(0, COLUMNS)
    held = column < size
    # The first columns of the weight do not wait for the kernel ahead.
    w = tl.load(at + column[None, :], inside[:, None] & held[None, :], other=0.0)
    follow(OVERLAP)
    total = w.to(tl.float32) * tl.load(x + column, held, other=0.0).to(tl.float32)[None, :]
    for begin in tl.range(COLUMNS, size, COLUMNS, num_stages=4):
        column = begin + tl.arange(0, COLUMNS)
        held = column < size
        w = tl.load(at + column[None, :], inside[:, None] & held[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x + column, held, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + row, inside, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


def one_token(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x: [1, in], weight: [out, in], bias: [out] or None → [1, out], of x's type unless `out` is given"""
    rows, size = weight.shape
    if out is None:
        out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    share = power_of_two(pieces(rows, _PROGRAMS) + 1) // 2
    taken = max(2, min(_MOST_ROWS, share))
    _one_token[(pieces(rows, taken),)](
        x, weight, bias, out, rows, size, BIAS=bias is not None, ROWS=taken, COLUMNS=_COLUMNS, num_warps=4,
        **overlapping(x.device),
    )  # fmt: skip
    return out
