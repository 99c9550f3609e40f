"""NUMA nodes, from a folder as Linux writes it: where replicas on a CPU run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine.cpu.packed_file import PackedFile
from slipstream.engine.memory.nodes import (
    NodePlace,
    on_one_of_several_nodes,
    place_replica,
    usable_nodes,
)
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.cpu.operations import WeightFormat
from slipstream.kernels.cpu.pack import Packed


def write_nodes(root: Path, *lists: str) -> Path:
    for number, text in enumerate(lists):
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    (root / "online").write_text(f"0-{len(lists) - 1}\n")
    return root


@pytest.fixture
def affinity(monkeypatch):
    def set_affinity(cores) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))

    set_affinity(range(16))
    return set_affinity


def test_nodes_have_the_cores_that_the_process_may_use(tmp_path, affinity):
    folder = write_nodes(tmp_path, "0-3,8-11", "4-7,12-15", "")  # the third has memory only
    first, second = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert usable_nodes(folder) == {0: first, 1: second}
    assert not on_one_of_several_nodes(folder)
    affinity({2, 9, 12})
    assert usable_nodes(folder) == {0: {2, 9}, 1: {12}}
    affinity({4, 5})
    assert usable_nodes(folder) == {1: {4, 5}}
    assert on_one_of_several_nodes(folder)
    assert usable_nodes(tmp_path / "none") == {}


def test_one_node_is_not_one_of_several(tmp_path, affinity):
    folder = write_nodes(tmp_path, "0-15", "")
    assert not on_one_of_several_nodes(folder)


TWO = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}


def places(cores=16.0, found=TWO, **settings):
    every = EngineSettings(**settings)
    return [
        place_replica(replace(every, replica=index), found, cores)
        for index in range(every.replicas)
    ]


def test_replicas_take_the_nodes_in_turn_and_divide_their_cores():
    first = NodePlace(0, TWO[0], 8)
    second = NodePlace(1, TWO[1], 8)
    assert places(replicas=2) == [first, second]
    assert places(replicas=3) == [first._replace(threads=4), second, first._replace(threads=4)]


@pytest.mark.parametrize(
    ("settings", "cores", "threads"),
    [
        ({"replicas": 2}, 16.0, [8, 8]),
        ({"replicas": 4}, 16.0, [4, 4, 4, 4]),
        ({"replicas": 5}, 16.0, [3, 4, 3, 4, 2]),
        ({"replicas": 2}, 6.0, [3, 3]),  # a quota
        ({"replicas": 2}, 1.0, [1, 1]),
        ({"replicas": 2, "ranks": 2}, 16.0, [4, 4]),
        ({"replicas": 2, "threads": 5}, 16.0, [5, 5]),
    ],
)
def test_threads_of_replicas(settings, cores, threads):
    assert [place.threads for place in places(cores, **settings)] == threads


def test_one_replica_or_one_node_is_not_placed():
    assert places() == [None]
    assert places(found={0: frozenset(range(16))}, replicas=2) == [None, None]
    assert places(found={}, replicas=2) == [None, None]


BIND = """
import os, sys
from pathlib import Path
from slipstream.engine.memory import nodes
from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe
cpu_probe.usable_nodes = lambda: nodes.usable_nodes(Path(sys.argv[1]))
settings = EngineSettings(device="cpu", replicas=2, replica=int(sys.argv[2]))
print(cpu_probe.bind_to_node(settings).threads, *sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_keeps_to_its_node(tmp_path, replica):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    folder = write_nodes(tmp_path, str(first), str(second))
    command = [sys.executable, "-c", BIND, str(folder), str(replica)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"1 {(first, second)[replica]}\n", done.stderr


def test_a_replica_of_a_node_copies_packed_weights(tmp_path):
    """The memory of a file belongs to the node of the process that has read it first."""
    data = np.arange(4096, dtype=np.int64).view(np.uint8)
    part = Packed(WeightFormat.BF16, data, 32, 512)
    written = PackedFile([tmp_path], "packed", "weights", "bfloat16", 0)
    written.add("a", [part])
    written.finish()

    def find(**more) -> Packed:
        found = PackedFile([tmp_path], "packed", "weights", "bfloat16", 0, **more).find("a")
        assert found is not None
        return found[0]

    own = find(own_memory=True)
    assert np.array_equal(own.data, data)
    assert own.data.flags.writeable  # not the file
    assert own.address % 64 == 0
    assert not find().data.flags.writeable
