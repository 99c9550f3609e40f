"""How soon the end of a rank is known, on one machine and over two. Other tests of the default run
assert the same reasons and answers without a clock.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
from cluster_server import Cluster
from real_server import RealServer
from test_ranks_server import ask, engine_processes, is_ready, post, start_server
from tiny_engine import build_tiny_engine
from tiny_server import is_running, wait_for

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
TOKENS = 240
MOST_SECONDS = 1.0  # until clients have the reason, and until no process is left
STOP_SECONDS = 10.0  # a stopped rank is given this long to continue
STOP_MARGIN_SECONDS = 3.0  # the stacks of all ranks are written before it is killed


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("deadlines"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine) -> Iterator[RealServer]:
    running = start_server(tmp_path_factory.mktemp("served"), engine, "--frontends", "1")
    yield running
    running.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, engine) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    running = Cluster(folder, engine, "--ranks=2", "--frontends=1")
    yield running
    running.close()


def time_reason(response: HTTPResponse, signal_rank: Callable[[], None], reason: str) -> float:
    """Return the seconds from a signal until a stream has ended with this reason."""
    first = response.readline()
    assert first.startswith(b"data:"), first
    began = time.monotonic()
    signal_rank()
    rest = response.read().decode()
    seconds = time.monotonic() - began
    assert f"the engine process failed: {reason}" in rest
    return seconds


def time_end(process: int, others: list[int]) -> float:
    """Kill a process, and return the seconds until the others have ended."""
    began = time.monotonic()
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, others)))
    return time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_known_to_the_client_within_a_second(server, rank):
    wait_for(lambda: is_ready(server), 60)
    expected = ask(server)
    process = engine_processes(server)[rank]
    response = post(server, "generate_stream", TOKENS)
    reason = f"rank {rank}: killed by SIGKILL"
    seconds = time_reason(response, lambda: os.kill(process, signal.SIGKILL), reason)
    assert seconds < MOST_SECONDS
    wait_for(lambda: is_ready(server), 60)
    assert ask(server) == expected


def test_a_stopped_rank_is_killed_after_ten_seconds(server):
    wait_for(lambda: is_ready(server), 60)
    process = engine_processes(server)[1]
    response = post(server, "generate_stream", TOKENS)
    reason = "rank 1 has been stopped by a signal for 10 s"
    seconds = time_reason(response, lambda: os.kill(process, signal.SIGSTOP), reason)
    assert STOP_SECONDS - 1 < seconds < STOP_SECONDS + STOP_MARGIN_SECONDS


def test_a_second_after_the_server_is_killed_no_process_is_left(server):
    """This test ends the server of the module, so it is the last one that uses it."""
    wait_for(lambda: is_ready(server), 60)
    assert time_end(server.process_id, engine_processes(server)) < MOST_SECONDS


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("rank 0", "rank 0: killed by SIGKILL"),
        ("rank 1", f"rank 1 on {HOST}: killed by SIGKILL"),
        ("host", f"rank 1 on {HOST}: its rank host has ended, or cannot be reached"),
    ],
)
def test_the_end_of_a_process_of_a_cluster_is_known_within_a_second(cluster, victim, reason):
    wait_for(cluster.is_ready, 60)
    expected = cluster.ask()
    processes = {
        "rank 0": cluster.rank_of(cluster.leader),
        "rank 1": cluster.rank_of(cluster.host),
        "host": cluster.host.process_id,
    }
    response = cluster.post("generate_stream", TOKENS)
    kill = processes[victim]
    assert time_reason(response, lambda: os.kill(kill, signal.SIGKILL), reason) < MOST_SECONDS
    if victim == "host":
        cluster.host.close()
        cluster.host = cluster.start(1)  # as the launcher would
    wait_for(cluster.is_ready, 60)
    assert cluster.ask() == expected


def test_a_second_after_the_leader_is_killed_no_process_of_the_cluster_is_left(cluster):
    """This test ends the cluster of the module, so it is the last one that uses it."""
    wait_for(cluster.is_ready, 60)
    ranks = [cluster.rank_of(cluster.leader), cluster.rank_of(cluster.host)]
    others = [cluster.host.process_id, *ranks]
    assert time_end(cluster.leader.process_id, others) < MOST_SECONDS
