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
