"""Copy runs of values to their places in an adapter page."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gpu.launch import CachedKernel


@CachedKernel
@triton.jit
def _copy_runs(values, runs, page, BLOCK: tl.constexpr):
    run = runs + tl.program_id(0) * 3
    start = tl.load(run)
    place = tl.load(run + 1)
    length = tl.load(run + 2)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(
            page + place + at, tl.load(values + start + at, at < length, other=0.0), at < length
        )


def copy_runs(values: Tensor, runs: Tensor, page: Tensor) -> None:
    """Copy runs of values [n] to a page; runs: int32 [runs, (start in values, start in the page,
    length)].
    """
    _copy_runs[(runs.shape[0],)](values, runs, page, BLOCK=1024, num_warps=4)
