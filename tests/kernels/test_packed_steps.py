"""The 12-bit cache in a step: rotated keys are cached and returned, cached tokens of prompts are
unpacked in advance.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_steps import DEVICE, tables_of
from test_packed_cache import BLOCK, DTYPE, RULES, TOLERANCE, new_cache, pack, read

from slipstream.engine.gpu.device_arrays import DeviceArrays
from slipstream.engine.gpu.runner import GpuRunner
from slipstream.engine.rows import Rows
from slipstream.kernels.gpu import unpacked_kv
from slipstream.kernels.gpu.decode_chunks import count_resident_ctas
from slipstream.kernels.gpu.rotary import rotate_write
from slipstream.kernels.options import KernelOptions


# keys begin inside a CTA's heads, and at their start
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 3), (8, 1), (20, 4)])
def test_rotated_heads_are_cached_and_returned(heads, kv_heads):
    """Rotations by quarters, which keep bfloat16 numbers exact."""
    torch.manual_seed(0)
    size, half, rotated = 64, 32, slice(heads + kv_heads)
    step = torch.randn(4, heads + 2 * kv_heads, size).bfloat16().float()
    cosine = torch.tensor([1.0, 0.0])[:, None].expand(2, size).contiguous()
    sine = torch.tensor([0.0, 1.0])[:, None] * torch.tensor([-1.0, 1.0]).repeat_interleave(half)
    positions, slots = torch.tensor([0, 1, 1, 0]), torch.tensor([3, 0, 9, 31])
    expected = step.clone()
    expected[1:3, rotated] = torch.cat((-step[1:3, rotated, half:], step[1:3, rotated, :half]), -1)
    cache = new_cache(BLOCK, kv_heads, size)
    given, places, written, *rope = (
        x.to(DEVICE) for x in (step.to(DTYPE), positions, slots, cosine, sine)
    )
    got = rotate_write(given, places, written, tuple(rope), None, None, 1e-6, *cache)
    assert torch.equal(got[:, rotated].float().cpu(), expected[:, rotated])
    cached = read(cache, size)[:, :, slots]
    wanted = expected[:, heads:].unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3).double()
    assert ((cached - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * 2.0**-22).all()


@pytest.mark.parametrize("rule", RULES[:2])
def test_step_is_the_same_with_kv_unpacked_in_advance(monkeypatch, rule):
    torch.manual_seed(0)
    # Decodes first, as a runner orders them.
    positions, counts, rows = (
        np.array([70, 5, 33, 0, 65]),
        np.array([1, 1, 3, 40, 20]),
        np.array([5, 1, 3, 0, 2]),
    )
    tables = tables_of(positions, counts, BLOCK)
    cache = pack(torch.randn(2, 2, (int(tables.max()) + 1) * BLOCK, 64).bfloat16().float())
    runner = GpuRunner.__new__(GpuRunner)
    spec = SimpleNamespace(kv_heads=2, head_size=64, kv_size=128)
    runner.model = SimpleNamespace(spec=spec, dtype=DTYPE, device=DEVICE, options=KernelOptions())
    runner.block_tokens, runner.resident_ctas, runner.cache = (
        BLOCK,
        count_resident_ctas(DEVICE, one_warp=True),
        cache[None],
    )
    runner.graphs, runner.adapters, runner._row_pages = SimpleNamespace(logits=None), None, None
    runner.rows = Rows(7, 200, 7, DeviceArrays(DEVICE))
    runner.rows.tables[torch.from_numpy(rows).to(DEVICE), : tables.shape[1]] = torch.from_numpy(
        tables
    ).to(DEVICE)
    heads = torch.randn(int(counts.sum()), 8, 64).bfloat16().to(DTYPE).to(DEVICE)
    found = []
    for worth in (10**9, 1):
        monkeypatch.setattr(unpacked_kv, "_MIN_NEW_TOKENS", worth)
        step = runner._step(rows, positions, counts, np.array([0]), None)
        assert (step.attention.unpacked is not None) is (worth == 1)
        found.append(step.attention.attend(heads, *cache, rule).float())
    assert (found[0] - found[1]).norm() < TOLERANCE * found[0].norm()


@pytest.mark.parametrize(
    ("positions", "counts", "dtype", "large_tiles"),
    [
        ([3072, 0], [200, 50], torch.int16, True),
        ([3071], [200], torch.int16, False),
        ([], [], torch.int16, False),
        ([9000], [20], torch.int16, False),
        ([3072], [200], torch.bfloat16, False),
    ],
)
def test_long_cached_prompts_skip_the_graph(positions, counts, dtype, large_tiles):
    runner = GpuRunner.__new__(GpuRunner)
    runner.model, runner.block_tokens = SimpleNamespace(spec=SimpleNamespace(kv_size=1024)), BLOCK
    runner.cache = torch.empty(0, dtype=dtype)
    assert (
        runner._unpacks_long_prefix(np.array(positions, dtype=int), np.array(counts, dtype=int))
        == large_tiles
    )
