"""What many new tokens look back at in a packed cache, unpacked once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import packed_cache
from slipstream.kernels.gpu.launch import Quick
from slipstream.kernels.gpu.packed_cache import read_whole

_MOST_BYTES = 2**29  # of unpacked keys and values; rounded up, they may take twice as much
_WORTH = 128  # new tokens to each cached one: fewer have it unpacked as fast while they look at it
# tables are so many blocks wide, or a multiple: for other widths kernels would be compiled anew
_WIDTHS = 16
_TOKENS = tl.constexpr(packed_cache.TOKENS)


@dataclass(slots=True)
class UnpackedKv:
    """The step's blocks one after the other, and which row has which of them."""

    blocks: Tensor  # int32 [blocks]: of the cache
    tables: Tensor  # int32 [rows with several new tokens, blocks]: of those above
    keys: Tensor  # bfloat16 [kv_heads, blocks * block_tokens, head_size]: one layer's at a time
    values: Tensor
    block_tokens: int

    def unpack(self, keys: Tensor, values: Tensor) -> None:
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
    """positions, counts: of rows with several new tokens; token_bytes: of one layer's unpacked keys
    and values
    """
    taken = int((-(-positions // block_tokens)).sum()) * block_tokens * token_bytes
    return 0 < taken <= _MOST_BYTES and int(positions @ counts) >= _WORTH * int(positions.sum())


def plan_unpacking(
    rows: np.ndarray, positions: np.ndarray, block_tokens: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """→ where the rows' blocks stand in tables of this width, [blocks], and tables of places in
    that: [rows, blocks]
    """
    blocks = -(-positions // block_tokens)
    row = np.repeat(np.arange(len(rows)), blocks)
    number = np.arange(len(row)) - (np.cumsum(blocks) - blocks)[row]  # of the row's blocks
    most = -(-int(blocks.max()) // _WIDTHS) * _WIDTHS
    tables = np.zeros((len(rows), most), dtype=np.int32)
    tables[row, number] = np.arange(len(row))
    return rows[row] * width + number, tables


@Quick
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
    index, head = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    for first in tl.static_range(0, BLOCK_TOKENS, _TOKENS):
        offset = first + tl.arange(0, _TOKENS)
        slot = block * BLOCK_TOKENS + offset
        kind = plain.dtype.element_ty
        numbers = read_whole(
            packed, head, packed_slots, slot, slot >= 0, kind, SIZE // 4, ON_DEVICE
        )
        place = (head.to(tl.int64) * plain_slots + index * BLOCK_TOKENS + offset)[
            :, None
        ] * SIZE + column
        tl.store(plain + place, numbers)
