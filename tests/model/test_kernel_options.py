"""Each switch of KernelOptions turns one optimisation off, and the plain path gives the same."""

import os
from types import SimpleNamespace

import pytest
import torch
from tiny_models import config_of, engine_tensors, random_model

from slipstream.kernels import packed_cache
from slipstream.kernels.options import KernelOptions
from slipstream.model import transformer
from slipstream.model.transformer import Transformer

CUDA = torch.device("cuda")


def test_all_optimisations_are_on_by_default():
    assert KernelOptions() == KernelOptions(
        compressed_weights=True, compressed_kv_cache=True, fused_gemv=True, mixed_graphs=True
    )


@pytest.mark.parametrize(("compressed", "copied"), [(True, 7), (False, 0)])
def test_compressed_weights_off_makes_no_copies(compressed, copied, monkeypatch):
    spec, tensors = engine_tensors(random_model(config_of("llama")))
    limits = []
    monkeypatch.setattr(
        transformer, "compress_weights", lambda linears, most: limits.append(most) or 7
    )
    options = KernelOptions(compressed_weights=compressed)
    cpu = torch.device("cpu")
    model = Transformer(spec, tensors, torch.float32, cpu, 64, options=options)
    assert model.compress_weights(1000) == copied
    assert limits == ([1000] if compressed else [])


@pytest.mark.parametrize(
    ("compressed", "fp8", "expected"),
    [
        (True, False, packed_cache.DTYPE),
        (False, False, torch.bfloat16),
        (False, True, torch.float8_e4m3fn),
    ],
)
def test_compressed_kv_cache_off_keeps_the_activations_type(compressed, fp8, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    options = KernelOptions(compressed_kv_cache=compressed)
    dtype = packed_cache.kv_cache_dtype(torch.bfloat16, CUDA, 128, 128, 32, fp8, options)
    assert dtype == expected


@pytest.mark.parametrize(("mixed", "total"), [(True, 11), (False, 3)])
def test_mixed_graphs_off_captures_decode_steps_only(mixed, total):
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    from slipstream.engine.gpu.runner import GpuRunner

    class Graphs:
        pool = "pool"
        logits = "memory"
        captures = 0

        def capture(self, largest, progress, logit_rows):
            assert (largest, logit_rows) == (4, 144 if mixed else 0)
            self.captures += 1
            progress(3)

    class Mixed:
        captures = 0

        def capture(self, sizes, pool, logits, progress):
            assert (pool, logits) == ("pool", "memory")
            self.captures += 1
            progress(len(sizes))

    runner = GpuRunner.__new__(GpuRunner)
    runner.model = SimpleNamespace(options=KernelOptions(mixed_graphs=mixed))
    runner.graphs = Graphs()
    runner.mixed = Mixed()
    reports = []
    runner.capture(4, progress=lambda done, total: reports.append((done, total)))
    assert runner.graphs.captures == 1
    assert runner.mixed.captures == int(mixed)
    assert reports[-1] == (total, total)
