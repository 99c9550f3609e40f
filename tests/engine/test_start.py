"""The memory of the cache and of compressed weights. Of a GPU only its free memory is used."""

from functools import partial

import pytest
import torch

from slipstream.engine import sizes as engine_sizes
from slipstream.engine.memory.host import HostMemory
from slipstream.engine.settings import EngineSettings
from slipstream.engine.with_torch import start
from slipstream.kernels.ranks import ALONE
from slipstream.model.spec import ModelSpec

SPEC = ModelSpec("LlamaForCausalLM", 1000, 64, 2, 4, 2, 16, 96, 4096)
BLOCK = 2 * 2 * 32 * 2 * 32  # bytes: keys and values, layers, kv_size, bfloat16, tokens
SPARE = 6 * 2**30


class Model:
    """A model whose compressed weights would take `copy_bytes`."""

    spec, cached_bytes = SPEC, BLOCK // 32

    def __init__(self, device: str, copy_bytes: int = 0) -> None:
        self.device, self._copy_bytes = torch.device(device), copy_bytes

    def compress_weights(self, most_bytes: int) -> int:
        return self._copy_bytes if self._copy_bytes <= most_bytes else 0


def divide(model: Model, longest: int, settings: dict, most_rows: int | None = None):
    sizes = engine_sizes.EngineSizes(str(model.device), "bfloat16", longest, step_tokens=8192)
    return start.divide_memory(model, EngineSettings(**settings), sizes, most_rows, ALONE)


def shared_out(
    monkeypatch, free: int, longest: int = 64, copy_bytes: int = 0, **settings
) -> tuple[int, int]:
    """Return the bytes of compressed weights and the blocks of the cache."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    parts = divide(Model("cuda", copy_bytes), longest, {"max_rows": 64, **settings})
    assert parts.rows == 64
    return parts.copy_bytes, parts.blocks


def of_rows(rows: int, longest: int = 64) -> int:
    """Return the bytes of rows: logits, tokens and tables."""
    return rows * (2 * 1000 * 4 + longest * 8 + -(-longest // 32) * 4)


def blocks(monkeypatch, free: int, longest: int = 64, **settings) -> int:
    return shared_out(monkeypatch, free, longest, **settings)[1]


def on_cpu(longest: int, **settings) -> int:
    parts = divide(Model("cpu", 1), longest, settings)
    assert parts.copy_bytes == 0
    return parts.blocks


def test_the_cache_leaves_memory_for_steps_and_rows(monkeypatch):
    free = SPARE + of_rows(64) + 100 * BLOCK
    assert blocks(monkeypatch, free, cache_memory_fraction=1.0) == 100
    assert blocks(monkeypatch, free, cache_memory_fraction=0.5) == 50
    assert blocks(monkeypatch, free, cache_tokens=320) == 10
    # without reuse, no more than all rows can fill
    assert blocks(monkeypatch, SPARE + 2**30, reuse=False) == 64 * 2


@pytest.mark.parametrize(
    ("settings", "build", "rows"),
    [({}, None, 1024), ({}, 12, 12), ({"max_rows": 1}, 12, 1), ({"max_rows": 2000}, 12, 2000)],
)
def test_rows_come_from_the_settings_or_the_build_or_the_memory(monkeypatch, settings, build, rows):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (SPARE + 2**33, 0))
    assert divide(Model("cuda"), 4096, settings, build).rows == rows


def test_rows_of_a_cpu_come_from_the_available_memory(monkeypatch):
    assert divide(Model("cpu"), 64, {}).rows == 256
    assert divide(Model("cpu"), 64, {}, most_rows=12).rows == 12
    monkeypatch.setattr(
        engine_sizes, "read_host_memory", lambda: HostMemory(2**40, 8 * 100 * of_rows(1) + 1)
    )
    assert divide(Model("cpu"), 64, {}).rows == 100


@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 640}])
def test_a_gpu_without_memory_for_one_sequence_is_an_error(monkeypatch, settings):
    with pytest.raises(ValueError, match="room for 0 cached tokens, one sequence of 64 needs more"):
        blocks(monkeypatch, SPARE, **settings)


def test_the_size_of_the_cache_in_bytes(monkeypatch):
    assert on_cpu(64, cache_bytes=10 * BLOCK + 1, cache_tokens=9999) == 10
    assert blocks(monkeypatch, SPARE + 2**30, cache_bytes=10 * BLOCK) == 10


def test_gpu_memory_utilization_is_a_share_of_the_whole_gpu(monkeypatch):
    weights = 2**30
    total = 2 * (SPARE + of_rows(64) + weights + 100 * BLOCK)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)
    half = {"max_rows": 64, "gpu_memory_utilization": 0.5}
    assert divide(Model("cuda"), 64, half).blocks == 100
    # it takes the place of the share of the remaining memory
    assert divide(Model("cuda"), 64, {**half, "cache_memory_fraction": 0.1}).blocks == 100


def test_replicas_on_one_gpu_have_a_part_of_it_each(monkeypatch):
    weights = 2**30
    total = 2 * (SPARE + of_rows(64) + weights + 100 * BLOCK)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)

    def blocks_of(free, **settings):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        sizes = engine_sizes.EngineSizes("cuda", "bfloat16", 64, 8192, sharing=2)
        chosen = EngineSettings(max_rows=64, replicas=2, **settings)
        return start.divide_memory(Model("cuda"), chosen, sizes, None, ALONE).blocks

    # the same whether the other replica has taken its part before or will
    assert blocks_of(total - weights, cache_memory_fraction=1.0) == 100
    assert blocks_of(total // 2 - weights, cache_memory_fraction=1.0) == 100
    assert blocks_of(total - weights, cache_memory_fraction=0.5) == 50
    assert blocks_of(total - weights, gpu_memory_utilization=1.0) == 100
    assert blocks_of(total - weights, cache_tokens=320) == 10  # those of each replica


def test_a_cache_larger_than_the_available_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(engine_sizes, "read_host_memory", lambda: HostMemory(2**40, 100 * BLOCK))
    assert on_cpu(64, cache_tokens=3200) == 100
    with pytest.raises(
        ValueError, match="which 3200 would fill: lower --kv-cache-memory-bytes or max_tokens_in_"
    ):
        on_cpu(64, cache_tokens=3201)


def test_on_a_cpu_the_cache_takes_512_mib_and_one_sequence_at_least(monkeypatch):
    monkeypatch.setattr(engine_sizes, "read_host_memory", lambda: HostMemory(2**40, 2**40))
    assert on_cpu(64) == 2**29 // BLOCK
    assert on_cpu(2**22) == 2**22 // 32


def test_an_amd_gpu_is_refused_and_ignored_by_auto(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start.find_device(EngineSettings(device="auto")) == "cpu"
    with pytest.raises(ValueError, match="device: this torch is for AMD's GPUs"):
        start.find_device(EngineSettings(device="cuda"))


def test_compressed_weights_take_up_to_a_sixth_of_the_budget(monkeypatch):
    free = SPARE + of_rows(64) + 120 * BLOCK  # the budget is 120 blocks
    whole = {"cache_memory_fraction": 1.0}
    assert shared_out(monkeypatch, free, **whole) == (0, 120)
    assert shared_out(monkeypatch, free, copy_bytes=20 * BLOCK, **whole) == (20 * BLOCK, 100)
    assert shared_out(monkeypatch, free, copy_bytes=20 * BLOCK + 1, **whole) == (0, 120)
    assert shared_out(monkeypatch, free, copy_bytes=10 * BLOCK, cache_memory_fraction=0.5) == (
        10 * BLOCK,
        50,
    )


def test_compressed_weights_leave_memory_for_one_sequence(monkeypatch):
    longest = 110 * 32 + 1  # 111 blocks
    free = SPARE + of_rows(64, longest) + 120 * BLOCK
    whole = {"cache_memory_fraction": 1.0}
    assert shared_out(monkeypatch, free, longest, copy_bytes=9 * BLOCK, **whole) == (9 * BLOCK, 111)
    assert shared_out(monkeypatch, free, longest, copy_bytes=9 * BLOCK + 1, **whole) == (0, 120)


def test_no_compressed_weights_when_the_cache_size_is_given(monkeypatch):
    assert shared_out(monkeypatch, SPARE + 2**30, copy_bytes=1, cache_tokens=320) == (0, 10)


def test_a_replica_takes_its_own_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(start, "find_device", lambda settings: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = partial(start.place, ranks=ALONE)
    assert place(EngineSettings()) == ("cuda", 1)
    assert place(EngineSettings(replicas=2, replica=1)) == ("cuda:1", 1)
    assert place(EngineSettings(replicas=2, devices=(1, 1))) == ("cuda:1", 2)
    assert place(EngineSettings(devices=(0,))) == ("cuda:0", 1)
    assert chosen == [1, 1, 0]


def test_replicas_on_a_cpu_share_it():
    assert start.place(EngineSettings(device="cpu", replicas=3), ALONE) == ("cpu", 3)
