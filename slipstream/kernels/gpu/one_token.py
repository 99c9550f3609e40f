"""The product of one token with a weight: a stream through the weight, spread over the whole machine.

Where the results join the residual stream, each program adds its own to it and begins to normalise the sum for the
product that follows, which ends it: a kernel between the two would take longer to begin and end than to work. (Not so
with several tokens, where every program of the next product would spend more time on that than the kernel does.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import Quick, follow, overlapping, pieces, power_of_two
from slipstream.kernels.inputs import Unscaled
from slipstream.kernels.normalisation import Norm

_PROGRAMS = 512  # enough for every processor to have reads in flight
_COLUMNS = 512
_MOST_ROWS = 16  # of a program: what registers hold


@Quick
@triton.jit(do_not_specialize=["pieces_in"])
def _one_token(
    x, squares, weight, bias, out, stream, gain, out_squares, rows, size, pieces_in, epsilon,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr, JOINED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = weight + row.to(tl.int64)[:, None] * size
    column = tl.arange(0, COLUMNS)
    held = column < size
    # The first columns of the weight do not wait for the kernel ahead.
    w = tl.load(at + column[None, :], inside[:, None] & held[None, :], other=0.0)
    follow(OVERLAP)
    # What is needed behind the product is asked for ahead of it.
    if SQUARES > 0:
        piece = tl.arange(0, SQUARES)
        sums = tl.load(squares + piece, piece < pieces_in, other=0.0)
    if JOINED:
        before, gains = tl.load(stream + row, inside, other=0.0), tl.load(gain + row, inside, other=0.0)
    total = w.to(tl.float32) * tl.load(x + column, held, other=0.0).to(tl.float32)[None, :]
    for begin in tl.range(COLUMNS, size, COLUMNS, num_stages=4):
        column = begin + tl.arange(0, COLUMNS)
        held = column < size
        w = tl.load(at + column[None, :], inside[:, None] & held[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x + column, held, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if SQUARES > 0:
        y *= tl.rsqrt(tl.sum(sums, 0) / size + epsilon)
    if BIAS:
        y += tl.load(bias + row, inside, other=0.0).to(tl.float32)
    if JOINED:
        y += before
        tl.store(stream + row, y, inside)
        tl.store(out_squares + tl.program_id(0), tl.sum(y * y, 0))
        y *= gains
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


def one_token(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x: [1, in], weight: [out, in], bias: [out] or None → [1, out], of x's type unless `out` is given"""
    if out is None:
        values = x.values if isinstance(x, Unscaled) else x
        out = values.new_empty((1, weight.shape[0]))
    _launch(x, weight, bias, out)
    return out


def one_token_joined(x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, norm: Norm) -> Unscaled:
    """hidden: float32 [1, out], to which the result is added in place → the sum, normalised but for its scale"""
    rows = weight.shape[0]
    out = Unscaled(x.new_empty((1, rows)), hidden.new_empty(pieces(rows, _rows(rows))), norm.epsilon)
    _launch(x, weight, bias, out.values, hidden, norm.weight, out.squares)
    return out


def _launch(
    x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None, out: Tensor,
    hidden: Tensor | None = None, gain: Tensor | None = None, out_squares: Tensor | None = None,
) -> None:  # fmt: skip
    values, squares, epsilon = x if isinstance(x, Unscaled) else (x, None, 0.0)
    rows, size = weight.shape
    taken, pieces_in = _rows(rows), squares.shape[0] if squares is not None else 0
    _one_token[(pieces(rows, taken),)](
        values, squares, weight, bias, out, hidden, gain, out_squares, rows, size, pieces_in, epsilon,
        BIAS=bias is not None, ROWS=taken, COLUMNS=_COLUMNS, SQUARES=power_of_two(pieces_in) if pieces_in else 0,
        JOINED=hidden is not None, num_warps=4, **overlapping(values.device),
    )  # fmt: skip


def _rows(rows: int) -> int:
    """Of a weight with so many, what a program takes."""
    return max(2, min(_MOST_ROWS, power_of_two(pieces(rows, _PROGRAMS) + 1) // 2))
