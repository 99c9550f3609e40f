"""Fused gated GEMM for many tokens: the up projection's result goes through the gate in registers,
never through memory.

One CTA per SM takes tile after tile and starts the next while it ends the last. A tile has the same
rows of both halves of the weight, which the copy engine (TMA) loads as one block. It makes prompts
of 2,048 and more tokens faster where its tiles fill the device (`is_faster`); to turn it off, let
`supports_gated_gemm` return False.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.activation import silu_times
from slipstream.kernels.gpu.launch import CachedKernel, pieces, shared_memory, sm_count

_TOKENS = 128  # tokens of a tile
_ROWS = 128  # rows of a tile, of each half of the weight
_COLUMNS = 64  # columns that are summed over at once
_BAND = 8  # tiles of tokens that are taken together, so that the weight's rows come from L2
_STAGES = 4
_SHARED_BYTES = 229_408  # shared memory of the stages and a tile of results, as compiled
# The least share of the device that tiles must fill: below it the library, whose tiles have other
# sizes, is faster. With very many tokens the saved memory traffic outweighs some idle SMs.
_MIN_BUSY = 0.95
_MIN_BUSY_VERY_MANY = 0.85
_VERY_MANY = 2048


@CachedKernel
@triton.jit(do_not_specialize=["tokens", "ctas"])
def _gated_gemm(
    x,
    weight,
    out,
    tokens,
    rows,
    size,
    ctas,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    token_tiles = tl.cdiv(tokens, TOKENS)
    row_tiles = rows // ROWS
    for tile in tl.range(tl.program_id(0), token_tiles * row_tiles, ctas, flatten=True):
        band = tile // (BAND * row_tiles) * BAND
        of_band = tl.minimum(token_tiles - band, BAND)
        token = (band + tile % (BAND * row_tiles) % of_band) * TOKENS
        row = tile % (BAND * row_tiles) // of_band * ROWS
        total = tl.zeros([TOKENS, 2 * ROWS], tl.float32)
        for column in tl.range(0, size, COLUMNS):
            both = tl.reshape(weight.load([0, row, column]), (2 * ROWS, COLUMNS))
            total = tl.dot(x.load([token, column]), tl.trans(both), total)
        halves = tl.permute(tl.reshape(total.to(out.dtype), (TOKENS, 2, ROWS)), (0, 2, 1))
        activated, multiplied = tl.split(halves)
        out.store([token, row], silu_times(activated, multiplied))


def gated_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(first half of the results) × second half: [tokens, size].

    x: [tokens, in], contiguous; weight: [2 * size, in], which `supports_gated_gemm` accepts
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, columns = x.shape
    size = weight.shape[0] // 2
    out = x.new_empty((tokens, size))
    ctas = min(sm_count(x.device), _tiles(tokens, size))
    _gated_gemm[(ctas,)](
        TensorDescriptor.from_tensor(x, [_TOKENS, _COLUMNS]),
        TensorDescriptor.from_tensor(weight.view(2, size, columns), [2, _ROWS, _COLUMNS]),
        TensorDescriptor.from_tensor(out, [_TOKENS, _ROWS]),
        tokens,
        size,
        columns,
        ctas,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BAND=_BAND,
        num_warps=8,
        num_stages=_STAGES,
    )
    return out


def supports_gated_gemm(weight: Tensor) -> bool:
    """Return whether the kernel takes a weight [2 * size, in]: on Hopper, which it is made for."""
    fits = (
        weight.element_size() == 2
        and weight.shape[0] % (2 * _ROWS) == 0
        and weight.shape[1] % _COLUMNS == 0
    )
    # the copy engine needs contiguous rows and aligned addresses
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    if not (fits and aligned and weight.is_cuda):
        return False
    hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and shared_memory(weight.device) >= _SHARED_BYTES


def is_faster(tokens: int, weight: Tensor) -> bool:
    """Return whether it is faster than the library's GEMM and a kernel for the gate."""
    tiles = _tiles(tokens, weight.shape[0] // 2)
    ctas = sm_count(weight.device)
    tile_slots = pieces(tiles, ctas) * ctas  # tiles that the device could compute meanwhile
    least = _MIN_BUSY if tokens < _VERY_MANY else _MIN_BUSY_VERY_MANY
    return tokens * tiles > least * tile_slots * pieces(tokens, _TOKENS) * _TOKENS


def _tiles(tokens: int, size: int) -> int:
    return pieces(tokens, _TOKENS) * (size // _ROWS)
