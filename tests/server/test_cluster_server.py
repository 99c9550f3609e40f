"""A server with ranks on two "machines": two addresses of this one, and the variables of mpirun."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_server import Cluster
from run_rank_host import ADDRESS, KEY
from tiny_engine import build_tiny_engine
from tiny_server import command_of, is_running, wait_for

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, engine) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("served"), engine, "--ranks=2", "--frontends=1")
    yield running
    running.close()


@pytest.fixture(scope="module")
def expected(cluster) -> str:
    """Return the first answer. `test_cluster_engine.py` compares answers with those of one rank."""
    answer: str = cluster.ask()
    return answer


def test_ranks_on_two_machines_serve(cluster, expected):
    assert len(expected.split()) == 24
    assert "on cpu with 2 ranks (MiB: of each rank), loaded in" in cluster.leader.log()
    assert f"process 1 of 2 from mpirun runs ranks for rank 0 at {ADDRESS}" in cluster.host.log()
    assert is_running(cluster.rank_of(cluster.leader))
    assert is_running(cluster.rank_of(cluster.host))


def test_the_cluster_key_is_not_on_a_command_line(cluster):
    for server in (cluster.leader, cluster.host):
        assert KEY not in command_of(server.process_id)
        assert KEY not in command_of(cluster.rank_of(server))


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("rank 1", f"rank 1 on {HOST}: killed by SIGKILL"),
        ("host", f"rank 1 on {HOST}: its rank host has ended, or cannot be reached"),
    ],
)
def test_the_engine_starts_again_after_the_end_of_any_process(cluster, expected, victim, reason):
    wait_for(cluster.is_ready)
    ranks = [cluster.rank_of(cluster.leader), cluster.rank_of(cluster.host)]
    process = ranks[1] if victim == "rank 1" else cluster.host.process_id
    response = cluster.post("generate_stream", 240)
    first = response.readline()
    assert first.startswith(b"data:"), first
    os.kill(process, signal.SIGKILL)
    assert f"the engine process failed: {reason}" in response.read().decode()
    assert not cluster.is_ready()
    wait_for(lambda: not any(is_running(rank) for rank in ranks))
    if victim == "host":
        cluster.host.close()
        cluster.host = cluster.start(1)  # as the launcher would
    wait_for(cluster.is_ready)
    assert cluster.ask() == expected


def test_a_stopped_rank_on_another_machine_is_named_to_the_client(cluster, expected):
    wait_for(cluster.is_ready)
    rank = cluster.rank_of(cluster.host)
    response = cluster.post("generate_stream", 240)
    assert response.readline().startswith(b"data:")
    os.kill(rank, signal.SIGSTOP)
    reason = f"the engine process failed: rank 1 on {HOST} has been stopped by a signal for 10 s"
    assert reason in response.read().decode()
    wait_for(lambda: not is_running(rank))
    wait_for(cluster.is_ready)
    assert cluster.ask() == expected


def test_no_process_is_left_after_the_leader_is_killed(cluster):
    """This test ends the cluster of the module, so it is the last one that uses it."""
    wait_for(cluster.is_ready)
    processes = [
        cluster.host.process_id,
        cluster.rank_of(cluster.leader),
        cluster.rank_of(cluster.host),
    ]
    os.kill(cluster.leader.process_id, signal.SIGKILL)
    wait_for(lambda: not any(is_running(process) for process in processes))
