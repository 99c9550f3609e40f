"""Where replicas run, and how they divide threads and memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.memory import division
from slipstream.engine.memory.host import HostMemory
from slipstream.engine.memory.placement import Placement, cpu_threads, place_rank
from slipstream.engine.settings import MAX_REPLICAS, EngineSettings

GIB = 2**30


def placements(gpus, **settings):
    every = EngineSettings(**settings)
    return [
        place_rank(replace(every, replica=index), 0, 1, gpus) for index in range(every.replicas)
    ]


def test_one_engine_stays_on_the_default_gpu():
    assert placements(4) == [Placement(None, 1)]


def test_without_devices_the_gpus_are_taken_in_turn():
    assert placements(2, replicas=2) == [Placement(0, 1), Placement(1, 1)]
    assert placements(1, replicas=2) == [Placement(0, 2), Placement(0, 2)]
    assert placements(2, replicas=3) == [Placement(0, 2), Placement(1, 1), Placement(0, 2)]


def test_devices_are_used_in_order():
    assert placements(4, devices=(3,)) == [Placement(3, 1)]
    assert placements(4, replicas=3, devices=(1, 1, 0)) == [
        Placement(1, 2),
        Placement(1, 2),
        Placement(0, 1),
    ]


def test_a_gpu_that_does_not_exist_is_named():
    with pytest.raises(
        ValueError, match=r"^devices: there is no GPU 2, 2 GPUs are visible: change"
    ):
        placements(2, replicas=2, devices=(0, 2))
    with pytest.raises(ValueError, match=r"there is no GPU 1, 1 GPU is visible"):
        placements(1, devices=(1,))


def test_the_ranks_of_each_replica_have_gpus_of_their_own():
    two = EngineSettings(replicas=2, ranks=2)

    def places(settings, gpus):
        return [
            place_rank(replace(settings, replica=replica), rank, 2, gpus).device
            for replica in (0, 1)
            for rank in (0, 1)
        ]

    assert places(two, 4) == [0, 1, 2, 3]
    assert places(two, 2) == [0, 1, 0, 1]
    assert places(replace(two, devices=(3, 1, 0, 2)), 4) == [3, 1, 0, 2]
    assert place_rank(replace(two, devices=(0, 0, 0, 0)), 1, 2, 1) == Placement(0, 4)
    with pytest.raises(ValueError, match=r"^2 ranks need 2 GPUs, 1 GPU is visible: use fewer"):
        place_rank(two, 0, 2, 1)
    assert cpu_threads(two, 8, 2) == 2


@given(st.integers(1, 128), st.integers(1, MAX_REPLICAS))
def test_replicas_divide_the_cores(cores, replicas):
    every = EngineSettings(replicas=replicas)
    threads = [cpu_threads(replace(every, replica=index), cores) for index in range(replicas)]
    assert sum(threads) == max(cores, replicas)
    assert max(threads) - min(threads) <= 1


def test_given_threads_are_those_of_each_replica():
    assert cpu_threads(EngineSettings(replicas=2, threads=6), 8) == 6


def test_replicas_on_a_cpu_divide_the_memory():
    host = HostMemory(total=64 * GIB, available=24 * GIB)
    assert division.cpu_share(host, 1, sized=False) == 24 * GIB
    assert division.cpu_share(host, 3, sized=False) == 8 * GIB
    # caches of a given size must fit the replica's part of all memory, also after a restart
    assert division.cpu_share(host, 1, sized=True) == 24 * GIB
    assert division.cpu_share(host, 2, sized=True) == 24 * GIB
    assert division.cpu_share(host, 4, sized=True) == 16 * GIB


@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize("fraction", [0.5, 0.9, 1.0])
def test_caches_of_replicas_on_one_gpu_fit_it_together(sharing, fraction):
    """Each replica may take its part of the GPU, whatever others have taken before it measures."""
    total = 140 * GIB
    weights = 15 * GIB
    sizes = division.SequenceSizes(32 * 98_304, 32, longest=8192, vocab_size=128_256)
    taken = 0
    for _ in range(sharing):
        free = total - taken - weights
        usable = division.usable_bytes(free, total, weights, 1 / sharing)
        rows, _ = division.gpu_rows(usable, sizes, 8192, fraction, None, division.RowLimits())
        budget = division.gpu_budget(usable, rows, sizes, 8192, fraction)
        blocks = division.gpu_blocks(budget, sizes, rows, True, None)
        taken += weights + division.SPARE_BYTES + rows * sizes.row_bytes
        taken += blocks * sizes.block_bytes
        assert blocks * sizes.block_tokens > 8192
    assert taken <= total


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": 0}, "replicas must be at least 1, not 0"),
        ({"replicas": 65}, "replicas must be 1 to 64, not 65"),
        ({"replicas": 1.5}, "replicas must be a whole number, not 1.5"),
        ({"replicas": 2, "replica": 2}, "replica 2 is not one of 2 replicas"),
        ({"devices": (-1,)}, r"devices must be GPU numbers from 0 on, not \[-1\]"),
        ({"replicas": 2, "devices": (0, 1, 2)}, "3 GPUs cannot be shared equally by 2 replicas"),
        (
            {"replicas": 2, "ranks": 3, "devices": (0, 1, 2, 3)},
            "4 GPUs for 2 replicas of 3 ranks: give each rank one",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        EngineSettings(**settings)
