"""A server with ranks on two "machines": two addresses of this one, and the variables of mpirun."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import RealServer, limit_cache
from run_rank_host import ADDRESS, KEY
from tiny_engine import build_tiny_engine
from tiny_server import children_of, command_of, is_running, wait_for

from slipstream.repository.templates import write_repository

MODEL = "tiny"
PROMPT = "5 6 7"
PENALTY = {"repetition_penalty": 1.3}
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, engine) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("served"), engine)
    yield running
    running.leader.close()
    running.host.close()


@pytest.fixture(scope="module")
def expected(cluster) -> str:
    """Return the first answer. `test_cluster_engine.py` compares answers with those of one rank."""
    answer: str = cluster.ask()
    return answer


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port: int = taken.getsockname()[1]
        return port


class Cluster:
    """tritonserver as two processes of mpirun, each the only one on its machine."""

    def __init__(self, folder: Path, engine: Path) -> None:
        self._folder = folder
        self._repository = folder / "repository"
        write_repository(self._repository, MODEL, engine, engine, 64)
        limit_cache(self._repository, 4096)
        self._port = free_port()
        self.host = self.start(1)
        self.leader = self.start(0).wait()

    def start(self, rank: int) -> RealServer:
        """Start a process. The name of its folder is its rank and the number of its start."""
        folder = self._folder / f"{rank}.{len(list(self._folder.iterdir()))}"
        flags = [f"--model-repository={self._repository}", "--ranks=2", "--frontends=1"]
        variables = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self._port),
            "SLIPSTREAM_CLUSTER_KEY": KEY,
            "CUDA_VISIBLE_DEVICES": "",
        }
        program = ("-m", "slipstream.cli.compat.tritonserver", *flags)
        addresses = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1")
        return RealServer(self._repository, folder, *program, *addresses, variables=variables)

    def post(self, route: str, tokens: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.leader.http, timeout=60)
        body = {"text_input": PROMPT, "max_tokens": tokens, "end_id": 95, **PENALTY}
        body["stream"] = route.endswith("stream")
        connection.request("POST", f"/v2/models/{MODEL}/{route}", json.dumps(body))
        return connection.getresponse()

    def ask(self) -> str:
        response = self.post("generate", 24)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        text: str = answer["text_output"]
        return text

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.leader.http, timeout=60)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200

    def rank_of(self, server: RealServer) -> int:
        """Return the process of the rank that this process has started."""
        (found,) = (
            child
            for child in children_of(server.process_id)
            if "engine_worker.process" in command_of(child)
        )
        return found


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
        pytest.param("rank 0", "rank 0: killed by SIGKILL", marks=pytest.mark.slow),
        ("rank 1", f"rank 1 on {HOST}: killed by SIGKILL"),
        ("host", f"rank 1 on {HOST}: its rank host has ended, or cannot be reached"),
    ],
)
def test_the_engine_starts_again_after_the_end_of_any_process(cluster, expected, victim, reason):
    wait_for(cluster.is_ready)
    ranks = [cluster.rank_of(cluster.leader), cluster.rank_of(cluster.host)]
    process = ranks[int(victim[-1])] if victim.startswith("rank") else cluster.host.process_id
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
