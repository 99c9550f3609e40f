"""How much memory the cache gets. A GPU is only asked what it has left."""

import pytest
import torch

from slipstream.engine import start
from slipstream.engine.settings import EngineSettings
from slipstream.model.spec import ModelSpec

SPEC = ModelSpec("LlamaForCausalLM", 1000, 64, 2, 4, 2, 16, 96, 4096)
BLOCK = 2 * 2 * 32 * 2 * 32  # bytes: keys and values, layers, kv_size, bfloat16, tokens
SPARE = 6 * 2**30


def blocks(monkeypatch, free: int, longest: int = 64, **settings) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    return start._pool_blocks(SPEC, EngineSettings(**settings), torch.bfloat16, longest, torch.device("cuda"))


def test_the_cache_leaves_room_for_steps_and_for_what_rows_take(monkeypatch):
    beside = 64 * (2 * 1000 * 4 + 64 * 8)
    assert blocks(monkeypatch, SPARE + beside + 100 * BLOCK, cache_memory_fraction=1.0) == 100
    assert blocks(monkeypatch, SPARE + beside + 100 * BLOCK, cache_memory_fraction=0.5) == 50
    assert blocks(monkeypatch, SPARE + beside + 100 * BLOCK, cache_tokens=320) == 10
    assert blocks(monkeypatch, SPARE + 2**30) == 64 * 2  # no more than all rows could fill


@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 640}])
def test_a_gpu_without_room_for_one_sequence_is_refused(monkeypatch, settings):
    with pytest.raises(ValueError, match="room for 0 cached tokens, one sequence of 64 needs more"):
        blocks(monkeypatch, SPARE, **settings)


@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_eight_bits_in_the_cache_need_a_device_that_knows_them(monkeypatch, capability, known):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert start._knows_eight_bits(torch.device("cuda")) is known
    assert not start._knows_eight_bits(torch.device("cpu"))


def test_a_cache_beyond_the_machines_memory_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(start.os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": BLOCK}.get)

    def on_cpu(tokens: int) -> int:
        settings = EngineSettings(cache_tokens=tokens)
        return start._pool_blocks(SPEC, settings, torch.bfloat16, 64, torch.device("cpu"))

    assert on_cpu(3200) == 100
    with pytest.raises(ValueError, match="which 3200 would fill: lower max_tokens_in_paged_kv_cache"):
        on_cpu(3201)


def test_on_a_cpu_the_cache_takes_512_mib_and_one_sequence_at_least():
    def on_cpu(longest: int) -> int:
        return start._pool_blocks(SPEC, EngineSettings(), torch.bfloat16, longest, torch.device("cpu"))

    assert on_cpu(64) == 2**29 // BLOCK
    assert on_cpu(2**22) == 2**22 // 32


def test_an_amd_gpu_is_refused_by_name_and_passed_over_by_auto(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start._device(EngineSettings(device="auto")).type == "cpu"
    with pytest.raises(ValueError, match="device: this torch is for AMD's GPUs"):
        start._device(EngineSettings(device="cuda"))


def copy_room(monkeypatch, free: int, longest: int, **settings) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    return start._copy_room(SPEC, EngineSettings(**settings), torch.bfloat16, longest, torch.device("cuda"))


def test_copies_of_weights_leave_room_for_the_cache(monkeypatch):
    """A sixth of what is free, unless the cache that was asked for, or one sequence, would no longer fit."""
    assert copy_room(monkeypatch, 60 * 2**30, 4096) == 10 * 2**30
    token = 2 * SPEC.layers * SPEC.kv_size * 2
    asked = 40 * 2**30 // token
    left = copy_room(monkeypatch, 60 * 2**30, 4096, cache_tokens=asked)
    assert 0 < left < 10 * 2**30
    more = copy_room(monkeypatch, 61 * 2**30, 4096, cache_tokens=asked)
    assert more - left == pytest.approx(0.9 * 2**30, abs=1)
    assert copy_room(monkeypatch, 60 * 2**30, 60 * 2**30 // token) < 0
