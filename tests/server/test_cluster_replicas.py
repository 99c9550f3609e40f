"""Replicas on two "machines": each runs on one of them, behind one server."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster_server import PROMPT, Cluster
from run_rank_host import KEY
from test_frontends import read_metric
from tiny_engine import build_tiny_engine
from tiny_server import command_of, is_running, wait_for

HOST = socket.gethostname()
METRIC = "slipstream_replica_requests_finished_total"
READY = "slipstream_replica_ready"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    engine = build_tiny_engine(tmp_path_factory.mktemp("replicas"))
    running = Cluster(tmp_path_factory.mktemp("served"), engine, "--replicas=2", "--frontends=2")
    yield running
    running.close()


def metric(cluster: Cluster, name: str) -> list[float]:
    """Return a metric of both replicas."""
    text = httpx.get(f"http://{cluster.leader.metrics}/metrics").text
    return [read_metric(text, name, replica=str(index)) for index in range(2)]


def test_each_machine_has_a_replica(cluster):
    assert is_running(cluster.rank_of(cluster.leader))
    assert is_running(cluster.rank_of(cluster.host))
    line = "the replicas of tensorrt_llm are started by the processes 0, 1 of 2 from mpirun"
    assert line in cluster.leader.log()
    assert "was started for" not in cluster.leader.log()
    assert metric(cluster, READY) == [1, 1]
    assert KEY not in command_of(cluster.rank_of(cluster.host))


def test_both_replicas_give_the_same_answers(cluster):
    before = metric(cluster, METRIC)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: cluster.ask(), range(32)))
    assert len(set(answers)) == 1
    assert len(answers[0].split()) == 24
    wait_for(lambda: sum(metric(cluster, METRIC)) == sum(before) + 32)
    assert min(after - old for after, old in zip(metric(cluster, METRIC), before, strict=True)) > 0


def test_requests_through_both_front_ends_reach_both_replicas(cluster):
    """The kernel gives each connection to one of the front ends."""
    before = metric(cluster, METRIC)
    prompts = [f"{number} {number + 1} 9" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(cluster.ask, prompts * 2))
    assert {len(answer.split()) for answer in answers} == {24}
    wait_for(lambda: sum(metric(cluster, METRIC)) == sum(before) + 80)


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("rank", f"rank 0 on {HOST}: killed by SIGKILL"),
        ("host", f"rank 0 on {HOST}: its rank host has ended, or cannot be reached"),
    ],
)
def test_the_end_of_a_machine_harms_only_its_own_streams(cluster, victim, reason):
    wait_for(lambda: metric(cluster, READY) == [1, 1])
    expected = cluster.ask()
    rank = cluster.rank_of(cluster.host)
    streams = [cluster.post("generate_stream", 240, f"{number} 2 3") for number in range(2)]
    assert all(stream.readline().startswith(b"data:") for stream in streams)
    os.kill(rank if victim == "rank" else cluster.host.process_id, signal.SIGKILL)
    texts = [stream.read().decode() for stream in streams]
    failed = [text for text in texts if f"the engine process failed: {reason}" in text]
    assert len(failed) == 1
    assert sum("failed" in text for text in texts) == 1
    assert cluster.is_ready()
    assert cluster.ask() == expected
    wait_for(lambda: not is_running(rank))
    if victim == "host":
        assert metric(cluster, READY) == [1, 0]
        cluster.host.close()
        cluster.host = cluster.start(1)  # as the launcher would
    wait_for(lambda: metric(cluster, READY) == [1, 1])
    assert cluster.ask() == expected


def test_a_front_end_that_ends_is_replaced_and_reaches_both(cluster):
    wait_for(lambda: metric(cluster, READY) == [1, 1])
    expected = cluster.ask()
    (frontend,) = cluster.frontends()
    os.kill(frontend, signal.SIGKILL)
    wait_for(lambda: not is_running(frontend))
    before = metric(cluster, METRIC)

    def answers() -> bool:
        try:
            return cluster.ask(PROMPT) == expected
        except OSError:  # a connection that waited for the ended front end
            return False

    wait_for(lambda: all(answers() for _ in range(20)))
    assert min(after - old for after, old in zip(metric(cluster, METRIC), before, strict=True)) > 0


def test_no_process_is_left_after_the_leader_is_killed(cluster):
    """This test ends the cluster of the module, so it is the last one that uses it."""
    wait_for(lambda: metric(cluster, READY) == [1, 1])
    ranks = [cluster.rank_of(cluster.leader), cluster.rank_of(cluster.host)]
    os.kill(cluster.leader.process_id, signal.SIGKILL)
    processes = [cluster.host.process_id, *ranks]
    wait_for(lambda: not any(is_running(process) for process in processes))
