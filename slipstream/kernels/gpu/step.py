"""The small kernels around a step: what to compute is read from the rows, what was drawn is written to them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def _step_inputs(
    rows, positions, tokens, tables, ids, slots, count, tokens_stride, tables_stride,
    BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, inside, other=0).to(tl.int64)
    position = tl.load(positions + at, inside, other=0)
    tl.store(ids + at, tl.load(tokens + row * tokens_stride + position, inside, other=0), inside)
    block = tl.load(tables + row * tables_stride + position // BLOCK_TOKENS, inside, other=0)
    tl.store(slots + at, block * BLOCK_TOKENS + position % BLOCK_TOKENS, inside)


def step_inputs(
    rows: Tensor,  # int32 [tokens]: the row of each token of the step
    positions: Tensor,  # int32 [tokens]
    tokens: Tensor,  # int64 [rows of the engine, longest]
    tables: Tensor,  # int32 [rows of the engine, blocks]
    block_tokens: int,
) -> tuple[Tensor, Tensor]:
    """→ token ids int64 [tokens], slots int32 [tokens]"""
    count = rows.shape[0]
    ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    slots = torch.empty(count, dtype=torch.int32, device=rows.device)
    _step_inputs[(triton.cdiv(count, _BLOCK),)](
        rows, positions, tokens, tables, ids, slots, count, tokens.stride(0), tables.stride(0),
        BLOCK_TOKENS=block_tokens, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return ids, slots


@triton.jit(do_not_specialize=["count"])
def _write_back(rows, lengths, drawn, tokens, count, tokens_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, inside, other=0).to(tl.int64)
    length = tl.load(lengths + at, inside, other=0)
    tl.store(tokens + row * tokens_stride + length, tl.load(drawn + at, inside, other=0), inside)


def write_back(rows: Tensor, lengths: Tensor, drawn: Tensor, tokens: Tensor) -> None:
    """drawn: int64 [samples] becomes the token after the `lengths` known ones of each of `rows` (int32 both)."""
    count = rows.shape[0]
    _write_back[(triton.cdiv(count, _BLOCK),)](
        rows, lengths, drawn, tokens, count, tokens.stride(0), BLOCK=_BLOCK, num_warps=4
    )
