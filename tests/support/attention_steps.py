"""Steps for tests of attention: rows with cached and new tokens, planned as the GPU runner does."""

import os

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined: import this first

triton = pytest.importorskip(
    "triton", reason="kernels need Triton, which a CPU installation of torch does not bring"
)

import triton.language as tl  # noqa: E402, F401  (for tests with kernels of their own)

from slipstream.kernels.gpu.attention import GpuAttention  # noqa: E402
from slipstream.kernels.gpu.decode_chunks import DecodePlan, count_resident_ctas, cut_chunks  # noqa: E402
from slipstream.kernels.gpu.prefill_tiles import PrefillPlan, cut_tiles, use_large_tiles  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")


def gpu_plan(tables, positions, counts, block, kv_heads, dtype, size, packed=False):
    """Plan a step on the GPU: decode rows first, as in the runner."""
    order = np.concatenate((np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)))
    positions = positions[order]
    counts = counts[order]
    decodes = int((counts == 1).sum())
    rows = order.astype(np.int32)
    offsets = np.concatenate(([0], np.cumsum(counts)))[:-1]

    def device(array):
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(DEVICE)

    decode = prefill = None
    if decodes:
        lengths = (positions + counts)[:decodes]
        decode = DecodePlan(
            device(
                cut_chunks(rows[:decodes], lengths, kv_heads, count_resident_ctas(DEVICE, packed))
            )
        )
    if decodes < len(rows):
        rest = slice(decodes, None)
        large_tiles = use_large_tiles(int((positions + counts).max()), dtype, size, DEVICE)
        tiles = cut_tiles(rows[rest], positions[rest], counts[rest], offsets[rest], large_tiles)
        prefill = PrefillPlan(*map(device, tiles), large_tiles=large_tiles)
    return order, GpuAttention(
        device(tables), block, count_resident_ctas(DEVICE, packed), decodes, decode, prefill
    )


MIXES = {
    "one token, nothing before": [(0, 1)],
    "block edges": [(31, 1), (32, 1), (30, 1), (33, 1)],
    "many chunks beside a short row": [(1100, 1), (2, 1)],
    "prompts": [(0, 5), (0, 130), (0, 128)],
    "prompts after cached tokens": [(40, 7), (129, 2), (1, 64)],
    "mixed": [(70, 1), (0, 40), (5, 1), (33, 3)],
}
if GPU:
    MIXES |= {
        "large batch": [(17 * i % 3000, 1) for i in range(260)],
        "100k context": [(100_000, 1), (5, 1)],
        "long prompts": [(0, 3000), (5000, 700), (12, 1)],
    }


def tables_of(positions, counts, block):
    """Return scattered blocks for each row; block 0 is the null block."""
    blocks = -(-(positions + counts) // block)
    tables = np.zeros((len(counts), blocks.max()), dtype=np.int32)
    free = np.random.default_rng(0).permutation(blocks.sum()) + 1
    for row, count in enumerate(blocks):
        tables[row, :count] = free[:count]
        free = free[count:]
    return tables


def slots_of(order, positions, counts, tables, block):
    """Return the cache slots of the step's tokens, in the row order of `gpu_plan`."""
    position = np.concatenate([np.arange(positions[r], positions[r] + counts[r]) for r in order])
    blocks = tables[np.repeat(order, counts[order]), position // block]
    return torch.from_numpy(blocks * block + position % block).long()
