"""The small kernels around a step: they read its inputs from the rows, and write the sampled tokens
to them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel, overlapping, pieces, wait_and_trigger

_BLOCK = 128
_PARTS = 32  # CTAs per row of logits


@CachedKernel
@triton.jit(do_not_specialize=["count"])
def _step_inputs(
    rows,
    positions,
    tokens,
    tables,
    ids,
    slots,
    count,
    tokens_stride,
    tables_stride,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_and_trigger(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, inside, other=0).to(tl.int64)
    position = tl.load(positions + at, inside, other=0)
    tl.store(ids + at, tl.load(tokens + row * tokens_stride + position, inside, other=0), inside)
    block = tl.load(tables + row * tables_stride + position // BLOCK_TOKENS, inside, other=0)
    tl.store(slots + at, block * BLOCK_TOKENS + position % BLOCK_TOKENS, inside)


def step_inputs(
    rows: Tensor,  # int32 [tokens]: the row of each token
    positions: Tensor,  # int32 [tokens]
    tokens: Tensor,  # int64 [rows of the engine, longest]
    tables: Tensor,  # int32 [rows of the engine, blocks]
    block_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the token ids of a step, int64 [tokens], and their cache slots, int32 [tokens]."""
    count = rows.shape[0]
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    slots = torch.empty(count, dtype=torch.int32, device=rows.device)
    _step_inputs[(pieces(count, _BLOCK),)](
        rows,
        positions,
        tokens,
        tables,
        ids,
        slots,
        count,
        tokens.stride(0),
        tables.stride(0),
        BLOCK_TOKENS=block_tokens,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlapping(rows.device),
    )
    return ids, slots


@CachedKernel
@triton.jit(do_not_specialize=["count"])
def _write_back(
    rows,
    lengths,
    drawn,
    tokens,
    count,
    tokens_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_and_trigger(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, inside, other=0).to(tl.int64)
    length = tl.load(lengths + at, inside, other=0)
    tl.store(tokens + row * tokens_stride + length, tl.load(drawn + at, inside, other=0), inside)


def write_back(rows: Tensor, lengths: Tensor, drawn: Tensor, tokens: Tensor) -> None:
    """Write sampled tokens (`drawn`, int64 [samples]) to `rows`, each after the first `lengths`
    tokens of its row. rows, lengths: int32 [samples]
    """
    count = rows.shape[0]
    _write_back[(pieces(count, _BLOCK),)](
        rows,
        lengths,
        drawn,
        tokens,
        count,
        tokens.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
        **overlapping(rows.device),
    )


@CachedKernel
@triton.jit
def _likeliest_of_parts(
    logits,
    best,
    tokens,
    vocab,
    stride,
    span,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_and_trigger(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top = float("-inf")
    token = part * span
    broken = 0
    end = tl.minimum((part + 1) * span, vocab)
    for begin in range(part * span, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, at < end, other=float("-inf")).to(tl.float32)
        broken += tl.sum((x != x).to(tl.int32), 0)
        value, index = tl.max(x, 0, return_indices=True)
        token = tl.where(value > top, begin + index, token)
        top = tl.maximum(top, value)
    tl.store(best + row * PARTS + part, tl.where(broken > 0, float("nan"), top))
    tl.store(tokens + row * PARTS + part, token)


@CachedKernel
@triton.jit
def _likeliest(
    best,
    tokens,
    best_out,
    tokens_out,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_and_trigger(OVERLAP)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    x = tl.load(best + row * PARTS + part)
    broken = tl.sum((x != x).to(tl.int32), 0)
    value, index = tl.max(x, 0, return_indices=True)
    tl.store(best_out + row, tl.where(broken > 0, float("nan"), value))
    tl.store(tokens_out + row, tl.load(tokens + row * PARTS + index).to(tl.int64))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row in float32 (nan if the row has one) and its token, the
    first of equals. logits: [rows, vocab]
    """
    rows, vocab = logits.shape
    span = pieces(vocab, _PARTS * 16) * 16
    part_best = torch.empty((rows, _PARTS), dtype=torch.float32, device=logits.device)
    part_tokens = torch.empty((rows, _PARTS), dtype=torch.int32, device=logits.device)
    _likeliest_of_parts[(rows, _PARTS)](
        logits,
        part_best,
        part_tokens,
        vocab,
        logits.stride(0),
        span,
        BLOCK=2048,
        PARTS=_PARTS,
        num_warps=4,
        **overlapping(logits.device),
    )
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _likeliest[(rows,)](
        part_best,
        part_tokens,
        best,
        tokens,
        PARTS=_PARTS,
        num_warps=1,
        **overlapping(logits.device),
    )
    return best, tokens
