"""The product of many tokens with the gate of the feed-forward part behind it: what the gate takes
never goes through memory.

Each processor has one program, which takes tiles one after the other and begins the next while it
ends the last. A tile has the same rows of both halves of the weight, brought by the copy engine as
if they lay together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.activation import silu_times
from slipstream.kernels.gpu.launch import Quick, pieces, shared_memory, sm_count

_TOKENS = 128  # of a tile
_ROWS = 128  # of each half of the weight
_COLUMNS = 64  # summed over at once
_BAND = 8  # tiles of tokens that are taken together, so that the weight's rows come from the cache
_STAGES = 4
_SHARED_BYTES = 229_408  # of the stages and a tile of results, as compiled
# Where tiles leave more of the machine idle than this, the library, whose tiles have other sizes,
# is faster. With very many tokens, what does not go through memory outweighs some of it.
_LEAST_BUSY, _LEAST_BUSY_OF_VERY_MANY = 0.95, 0.85
_VERY_MANY = 2048


@Quick
@triton.jit(do_not_specialize=["tokens", "programs"])
def _gated_gemm(
    x,
    weight,
    out,
    tokens,
    rows,
    size,
    programs,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    high, wide = tl.cdiv(tokens, TOKENS), rows // ROWS  # tiles
    for tile in tl.range(tl.program_id(0), high * wide, programs, flatten=True):
        band = tile // (BAND * wide) * BAND
        of_band = tl.minimum(high - band, BAND)
        token = (band + tile % (BAND * wide) % of_band) * TOKENS
        row = tile % (BAND * wide) // of_band * ROWS
        total = tl.zeros([TOKENS, 2 * ROWS], tl.float32)
        for column in tl.range(0, size, COLUMNS):
            both = tl.reshape(weight.load([0, row, column]), (2 * ROWS, COLUMNS))
            total = tl.dot(x.load([token, column]), tl.trans(both), total)
        halves = tl.permute(tl.reshape(total.to(out.dtype), (TOKENS, 2, ROWS)), (0, 2, 1))
        activated, multiplied = tl.split(halves)
        out.store([token, row], silu_times(activated, multiplied))


def gated_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """x: [tokens, in], contiguous; weight: [2 * size, in] → [tokens, size]: the first half of the
    results, activated by silu, times the second. Sizes are as `supports_gated_gemm` asks.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    tokens, columns = x.shape
    size = weight.shape[0] // 2
    out = x.new_empty((tokens, size))
    programs = min(sm_count(x.device), _tiles(tokens, size))
    _gated_gemm[(programs,)](
        TensorDescriptor.from_tensor(x, [_TOKENS, _COLUMNS]),
        TensorDescriptor.from_tensor(weight.view(2, size, columns), [2, _ROWS, _COLUMNS]),
        TensorDescriptor.from_tensor(out, [_TOKENS, _ROWS]),
        tokens,
        size,
        columns,
        programs,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BAND=_BAND,
        num_warps=8,
        num_stages=_STAGES,
    )
    return out


def supports_gated_gemm(weight: Tensor) -> bool:
    """Whether a weight [2 * size, in] is one whose halves this multiplies: on Hopper, for which it
    is made.
    """
    fits = (
        weight.element_size() == 2
        and weight.shape[0] % (2 * _ROWS) == 0
        and weight.shape[1] % _COLUMNS == 0
    )
    in_lines = weight.is_contiguous() and weight.data_ptr() % 16 == 0  # as the copy engine wants it
    if (
        not (fits and in_lines)
        or not weight.is_cuda
        or torch.cuda.get_device_capability(weight.device)[0] != 9
    ):
        return False
    return shared_memory(weight.device) >= _SHARED_BYTES


def is_faster(tokens: int, weight: Tensor) -> bool:
    """Whether it is faster than the library and a kernel for the gate."""
    tiles, programs = _tiles(tokens, weight.shape[0] // 2), sm_count(weight.device)
    until_the_last = pieces(tiles, programs) * programs  # tiles that there is time for
    least = _LEAST_BUSY if tokens < _VERY_MANY else _LEAST_BUSY_OF_VERY_MANY
    return tokens * tiles > least * until_the_last * pieces(tokens, _TOKENS) * _TOKENS


def _tiles(tokens: int, size: int) -> int:
    return pieces(tokens, _TOKENS) * (size // _ROWS)
