"""The type and the size of the KV cache. Of a GPU only the compute capability is used."""

from dataclasses import replace

import pytest
import torch

from slipstream.engine.with_torch import start
from slipstream.kernels import packed_cache
from slipstream.model.spec import ModelSpec
from slipstream.model.transformer import Transformer

SPEC = ModelSpec("LlamaForCausalLM", 1000, 256, 2, 4, 2, 64, 96, 4096)
HALF, PACKED, EIGHT = torch.bfloat16, packed_cache.DTYPE, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("device", "dtype", "block", "fp8", "changed", "kept"),
    [
        ("cuda", HALF, 32, False, {}, PACKED),
        ("cpu", HALF, 32, False, {}, HALF),
        ("cuda", torch.float16, 32, False, {}, torch.float16),
        ("cuda", HALF, 16, False, {}, HALF),
        ("cuda", HALF, 32, False, {"position": "learned"}, HALF),
        ("cuda", HALF, 32, False, {"rotary_fraction": 0.5}, HALF),
        ("cuda", HALF, 32, True, {}, EIGHT),
        ("cpu", HALF, 32, True, {}, HALF),
    ],
)
def test_cache_dtype_by_device_dtype_and_settings(
    monkeypatch, device, dtype, block, fp8, changed, kept
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert (
        start.cache_dtype(replace(SPEC, **changed), dtype, torch.device(device), block, fp8) == kept
    )


def test_fp8_cache_falls_back_to_12_bits_before_ada(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert start.cache_dtype(SPEC, HALF, torch.device("cuda"), 32, True) == PACKED


@pytest.mark.parametrize(
    ("capability", "converts"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_ada_and_later_devices_convert_e4m3(monkeypatch, capability, converts):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packed_cache.converts_e4m3(torch.device("cuda")) is converts
    assert not packed_cache.converts_e4m3(torch.device("cpu"))


@pytest.mark.parametrize(("kept", "numbers"), [(HALF, 64 * 2), (EIGHT, 64), (PACKED, 50 * 2)])
def test_cache_bytes_are_slots_times_bytes_per_token(kept, numbers):
    model = Transformer.__new__(Transformer)
    model.spec, model.cache_dtype, model.device = SPEC, kept, torch.device("cpu")
    assert model.cached_bytes == 2 * 2 * 2 * numbers
    assert model.new_cache(96).nbytes == 96 * model.cached_bytes
