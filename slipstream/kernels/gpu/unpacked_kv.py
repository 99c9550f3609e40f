"""Cached tokens of prompts in a 12-bit cache, unpacked once for all of the step's new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import packed_cache
from slipstream.kernels.gpu.launch import CachedKernel
from slipstream.kernels.gpu.packed_cache import read_whole

_MAX_BYTES = 2**29  # bytes of unpacked keys and values; rounded up, they may take twice as much
_MIN_NEW_TOKENS = 128  # new tokens per cached one; with fewer, attention unpacks as fast itself
_WIDTH_MULTIPLE = 16  # blocks of a table's row: kernels are recompiled for other widths
_TOKENS = tl.constexpr(packed_cache.TOKENS)


@dataclass(slots=True)
class UnpackedKv:
    """Unpacked blocks of the step's prompts, one layer at a time."""

    blocks: Tensor  # int32 [blocks]: blocks of the cache
    tables: Tensor  # int32 [rows with several new tokens, blocks]: indices into `blocks`
    keys: Tensor  # bfloat16 [kv_heads, blocks * block_tokens, head_size]
    values: Tensor
    block_tokens: int

    def unpack(self, keys: Tensor, values: Tensor) -> None:
        """Unpack one layer of the cache."""
        for packed, plain in ((keys, self.keys), (values, self.values)):
            kv_heads, slots, size = plain.shape
            _unpack[(len(self.blocks), kv_heads)](
                packed,
                self.blocks,
                plain,
                packed.shape[1],
                slots,
                SIZE=size,
                BLOCK_TOKENS=self.block_tokens,
                ON_DEVICE=plain.is_cuda,
                num_warps=2,
            )


def unpacking_pays(
    positions: np.ndarray, counts: np.ndarray, block_tokens: int, token_bytes: int
) -> bool:
    """Return whether unpacking in advance is faster.

    positions, counts: of rows with several new tokens; token_bytes: bytes of a token's unpacked
    keys and values in one layer
    """
    unpacked_bytes = int((-(-positions // block_tokens)).sum()) * block_tokens * token_bytes
    cached = int(positions.sum())
    fits = 0 < unpacked_bytes <= _MAX_BYTES
    return fits and int(positions @ counts) >= _MIN_NEW_TOKENS * cached


def plan_unpacking(
    rows: np.ndarray, positions: np.ndarray, block_tokens: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions [blocks] of the rows' blocks in tables of this width, and new tables
    [rows, blocks] of indices into them.
    """
    blocks = -(-positions // block_tokens)
    row = np.repeat(np.arange(len(rows)), blocks)
    number = np.arange(len(row)) - (np.cumsum(blocks) - blocks)[row]  # among the row's blocks
    most = -(-int(blocks.max()) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    tables = np.zeros((len(rows), most), dtype=np.int32)
    tables[row, number] = np.arange(len(row))
    return rows[row] * width + number, tables


@CachedKernel
@triton.jit
def _unpack(
    packed,
    blocks,
    plain,
    packed_slots,
    plain_slots,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    for first in tl.static_range(0, BLOCK_TOKENS, _TOKENS):
        offset = first + tl.arange(0, _TOKENS)
        slot = block * BLOCK_TOKENS + offset
        kind = plain.dtype.element_ty
        numbers = read_whole(
            packed, kv_head, packed_slots, slot, slot >= 0, kind, SIZE // 4, ON_DEVICE
        )
        place = (kv_head.to(tl.int64) * plain_slots + index * BLOCK_TOKENS + offset)[
            :, None
        ] * SIZE + column
        tl.store(plain + place, numbers)
