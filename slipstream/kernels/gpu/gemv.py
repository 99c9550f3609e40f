"""GEMV: a single token times a weight. Memory-bound: every SM reads a share of the weight.

The fused form adds the result to the residual stream and starts the norm of the sum. The next GEMV
finishes the norm. A norm kernel in between would take longer to start and end than to work, so that
fusing makes a decode step of one row faster; switch: `KernelOptions.fused_gemv`. With several
tokens it does not pay: every CTA of the next GEMM would spend more time on the norm than a kernel
does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.bf12 import GROUP, RUN, WORDS, widened
from slipstream.kernels.gpu.launch import (
    CachedKernel,
    overlapping,
    pieces,
    power_of_two,
    wait_and_trigger,
)
from slipstream.kernels.inputs import Unscaled
from slipstream.kernels.normalisation import Norm

_CTAS = 512  # enough for every SM to have loads in flight
# By whether the weight has 12 bits: columns that a CTA takes at once, such tiles in flight, and the
# most rows that its registers hold.
_COLUMNS = {False: 512, True: 1024}
_STAGES = {False: 4, True: 3}
_MAX_ROWS = {False: 16, True: 8}
# Unpacked 12-bit numbers are too small by 2^112. Activations get 2^64 of it, so that the terms are
# normal float32 numbers for activations of 2^-57 to 2^63; the sum gets the rest.
_UP = tl.constexpr(2.0**64)
_REST = tl.constexpr(2.0**48)


@CachedKernel
@triton.jit(do_not_specialize=["pieces_in"])
def _gemv(
    x,
    squares,
    weight,
    scales,
    bias,
    out,
    stream,
    gain,
    out_squares,
    rows,
    size,
    pieces_in,
    epsilon,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SQUARES: tl.constexpr,
    FUSED: tl.constexpr,
    STAGES: tl.constexpr,
    BF12: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at = weight + row.to(tl.int64)[:, None] * (size // GROUP * WORDS if BF12 else size)
    # The first columns of the weight are loaded while the previous kernel finishes.
    w = _read(at, 0, size, inside, COLUMNS, BF12)
    wait_and_trigger(OVERLAP)
    # Loads for the end of the kernel are issued before its loop.
    if SQUARES > 0:
        piece = tl.arange(0, SQUARES)
        sums = tl.load(squares + piece, piece < pieces_in, other=0.0)
    if FUSED:
        before = tl.load(stream + row, inside, other=0.0)
        gains = tl.load(gain + row, inside, other=0.0)
    total = tl.zeros([ROWS, COLUMNS // 4 if BF12 else COLUMNS], tl.float32)
    total = _add(total, w, x, 0, size, COLUMNS, BF12, ON_DEVICE)
    for begin in tl.range(COLUMNS, size, COLUMNS, num_stages=STAGES):
        next_w = _read(at, begin, size, inside, COLUMNS, BF12)
        total = _add(total, next_w, x, begin, size, COLUMNS, BF12, ON_DEVICE)
    y = tl.sum(total, 1)
    if BF12:
        y = y * _REST * tl.load(scales + row, inside, other=0.0)  # the scale last: it may be large
    if SQUARES > 0:
        y *= tl.rsqrt(tl.sum(sums, 0) / size + epsilon)
    if BIAS:
        y += tl.load(bias + row, inside, other=0.0).to(tl.float32)
    if FUSED:
        y += before
        tl.store(stream + row, y, inside)
        tl.store(out_squares + tl.program_id(0), tl.sum(y * y, 0))
        y *= gains
    tl.store(out + row, y.to(out.dtype.element_ty), inside)


@triton.jit
def _read(at, begin, size, inside, COLUMNS: tl.constexpr, BF12: tl.constexpr):
    """Load the stored form of a CTA's rows at some columns."""
    if BF12:
        place = tl.arange(0, COLUMNS // 4)
        word = at + (place // RUN * WORDS + place % RUN + begin // GROUP * WORDS)[None, :]
        held = inside[:, None] & (begin + place // RUN * GROUP < size)[None, :]
        return (
            tl.load(word, held, other=0),
            tl.load(word + RUN, held, other=0),
            tl.load(word + 2 * RUN, held, other=0),
        )
    else:
        column = begin + tl.arange(0, COLUMNS)
        return (
            tl.load(at + column[None, :], inside[:, None] & (column < size)[None, :], other=0.0),
        )


@triton.jit
def _add(
    total,
    w,
    x,
    begin,
    size,
    COLUMNS: tl.constexpr,
    BF12: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Return the total plus w × x. w: from `_read` at the same columns"""
    if BF12:
        place = tl.arange(0, COLUMNS // 4)
        column = begin + place // RUN * GROUP + place % RUN
        runs = widened(w[0], w[1], w[2], ON_DEVICE)
        for run in tl.static_range(4):
            total += runs[run] * (_activations(x, column + run * RUN, size) * _UP)[None, :]
        return total
    else:
        return (
            total
            + w[0].to(tl.float32) * _activations(x, begin + tl.arange(0, COLUMNS), size)[None, :]
        )


@triton.jit
def _activations(x, column, size):
    return tl.load(x + column, column < size, other=0.0).to(tl.float32)


def gemv(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Return [1, out], of x's type unless `out` is given.

    x: [1, in]; weight: [out, in], or Bf12Weight's words with its scales; bias: [out] or None
    """
    if out is None:
        values = x.values if isinstance(x, Unscaled) else x
        out = values.new_empty((1, weight.shape[0]))
    _launch(x, weight, scales, bias, out)
    return out


def fused_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    norm: Norm,
    scales: Tensor | None = None,
) -> Unscaled:
    """Add the result to `hidden`, float32 [1, out], in place. Return the sum, normalised except for
    the RMS factor.
    """
    rows = weight.shape[0]
    squares = hidden.new_empty(pieces(rows, _rows_per_cta(rows, scales)))
    out = Unscaled(x.new_empty((1, rows)), squares, norm.epsilon)
    _launch(x, weight, scales, bias, out.values, hidden, norm.weight, out.squares)
    return out


def _launch(
    x: Tensor | Unscaled,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    hidden: Tensor | None = None,
    gain: Tensor | None = None,
    out_squares: Tensor | None = None,
) -> None:
    values, squares, epsilon = x if isinstance(x, Unscaled) else (x, None, 0.0)
    rows = weight.shape[0]
    size = values.shape[1]
    bf12 = scales is not None
    cta_rows = _rows_per_cta(rows, scales)
    pieces_in = squares.shape[0] if squares is not None else 0
    _gemv[(pieces(rows, cta_rows),)](
        values,
        squares,
        weight,
        scales,
        bias,
        out,
        hidden,
        gain,
        out_squares,
        rows,
        size,
        pieces_in,
        epsilon,
        BIAS=bias is not None,
        ROWS=cta_rows,
        COLUMNS=_COLUMNS[bf12],
        STAGES=_STAGES[bf12],
        SQUARES=power_of_two(pieces_in) if pieces_in else 0,
        FUSED=hidden is not None,
        BF12=bf12,
        ON_DEVICE=values.device.type == "cuda",
        num_warps=4,
        **overlapping(values.device),
    )


def _rows_per_cta(rows: int, scales: Tensor | None) -> int:
    """rows: of the weight"""
    even = power_of_two(pieces(rows, _CTAS) + 1) // 2
    return max(2, min(_MAX_ROWS[scales is not None], even))
