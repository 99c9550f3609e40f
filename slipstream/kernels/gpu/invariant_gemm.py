"""A GEMM whose result for a token does not depend on the other tokens. Switch:
`KernelOptions.deterministic`.

The sum over the inputs is never split, and it runs from the first input to the last in steps of the
same matrix instruction, whatever the number of tokens. Tiles for few and for many tokens differ in
their sizes only, which say which CTA computes an output, not how.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, pieces

_FEW_TOKENS = 64  # tokens up to which a step is bound by reading the weight
_BAND = 8  # tiles of tokens that are taken together, so that the weight's rows come from L2
# Hopper's matrix instruction takes 64 tokens at least, so both sizes use it.
_FEW = {"TOKENS": 64, "ROWS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 4}
_MANY = {"TOKENS": 128, "ROWS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 4}
_FLOAT32 = {"TOKENS": 32, "ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}


@CachedKernel
@triton.jit(do_not_specialize=["tokens"])
def _gemm(
    x,
    weight,
    token_scales,
    row_scales,
    bias,
    out,
    tokens,
    rows,
    columns,
    KIND: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BAND: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token_tiles = tl.cdiv(tokens, TOKENS)
    row_tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    band = tile // (BAND * row_tiles) * BAND
    of_band = tl.minimum(token_tiles - band, BAND)
    token = (band + tile % (BAND * row_tiles) % of_band) * TOKENS + tl.arange(0, TOKENS)
    row = tile % (BAND * row_tiles) // of_band * ROWS + tl.arange(0, ROWS)
    held = token < tokens
    real = row < rows
    x_base = x + tl.where(held, token, 0).to(tl.int64)[:, None] * columns
    w_base = weight + tl.where(real, row, 0).to(tl.int64)[:, None] * columns
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for begin in tl.range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        inside = column < columns
        a = tl.load(x_base + column, inside, other=0.0).to(KIND)
        w = tl.load(w_base + column, inside, other=0.0).to(KIND)
        total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
    if ROW_SCALES:
        total *= tl.load(row_scales + row, real, other=0.0)[None, :]
    if TOKEN_SCALES:
        total *= tl.load(token_scales + token, held, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + row, real, other=0.0).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(place, total.to(out.dtype.element_ty), held[:, None] & real[None, :])


def invariant_gemm(
    x: Tensor,  # [tokens, in]
    weight: Tensor,  # [out, in], contiguous
    row_scales: Tensor | None,  # float32 [out] of an 8-bit weight
    bias: Tensor | None,  # [out]
    token_scales: Tensor | None = None,  # float32 [tokens, 1] of e4m3 activations
    out: Tensor | None = None,  # [tokens, out]
) -> Tensor:
    """Return x times the weight, [tokens, out], in the type of x, or of `out` if it is given.
    e4m3 activations give bfloat16.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    kind = torch.bfloat16 if x.element_size() == 1 else x.dtype
    if out is None:
        out = torch.empty((tokens, rows), dtype=kind, device=x.device)
    if tokens == 0:
        return out
    tuning = _tuning(tokens, kind)
    grid = (pieces(tokens, tuning["TOKENS"]) * pieces(rows, tuning["ROWS"]),)
    _gemm[grid](
        x.contiguous(),
        weight,
        token_scales,
        row_scales,
        bias,
        out,
        tokens,
        rows,
        columns,
        KIND=_TYPES[kind],
        TOKEN_SCALES=token_scales is not None,
        ROW_SCALES=row_scales is not None,
        BIAS=bias is not None,
        PRECISION="ieee" if kind == torch.float32 else "tf32",
        BAND=_BAND,
        **tuning,
    )
    return out


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _tuning(tokens: int, kind: torch.dtype) -> dict[str, Any]:
    if kind == torch.float32:
        return _FLOAT32
    return _FEW if tokens <= _FEW_TOKENS else _MANY
