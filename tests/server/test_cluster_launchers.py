"""Both commands serve over two "machines" by the variables of each launcher, with two front ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_server import SLIPSTREAM, TRITONSERVER, Cluster
from real_server import RealServer
from run_rank_host import ADDRESS
from tiny_engine import build_tiny_engine
from tiny_server import is_running, wait_for


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("launchers"))


@pytest.mark.parametrize(
    ("launcher", "program", "flags"),
    [
        ("srun", TRITONSERVER, ("--ranks=2", "--frontends=2")),
        ("torchrun", SLIPSTREAM, ("--frontends=2",)),  # a rank for each process
        ("LeaderWorkerSet", SLIPSTREAM, ("--replicas=2", "--frontends=2")),
    ],
)
def test_a_command_serves_over_two_machines(tmp_path, engine, launcher, program, flags):
    cluster = Cluster(tmp_path, engine, *flags, launcher=launcher, program=program)
    try:
        answers = {cluster.ask() for _ in range(8)}  # the front ends share the connections
        assert len(answers) == 1
        assert len(answers.pop().split()) == 24
        assert len(cluster.frontends()) == 1  # besides the first one
        ranks = [cluster.rank_of(cluster.leader), cluster.rank_of(cluster.host)]
        line = f"process 1 of 2 from {launcher} runs ranks for rank 0 at {ADDRESS}"
        assert line in cluster.host.log()
        assert "Started HTTPService" not in cluster.host.log()
        cluster.leader.close()
        wait_for(lambda: not is_running(cluster.host.process_id))
        assert not any(is_running(rank) for rank in ranks)
    finally:
        cluster.close()


def test_slipstream_start_is_one_server_under_a_launcher_on_one_machine(tmp_path):
    """The second process serves nothing, and needs no model."""
    variables = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    other = RealServer(tmp_path / "none", tmp_path / "1", variables=variables)
    line = "rank 1 of 2 from mpirun serves nothing and waits for a signal to end"
    wait_for(lambda: line in other.log())
    assert not other.ports
    other.close()


def test_slipstream_start_names_the_missing_cluster_key(tmp_path):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    other = RealServer(tmp_path / "none", tmp_path / "1", variables=variables)
    line = "ranks on several machines need a cluster key: give all of them the same"
    wait_for(lambda: line in other.log())
    other.close()
