"""A replica of Ray Serve whose engine has a rank on each of two nodes, on CPUs.

VENV/bin/pytest -m cluster tests/deploy/test_ray_nodes.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_ray import BODY, NAME, Site, cluster, repository, serve, servers
from tiny_server import children_of, command_of, is_running, wait_for

from slipstream.llm import LLM

pytestmark = pytest.mark.cluster
__all__ = ["cluster", "repository"]

TOKENS = 64


@pytest.fixture(scope="module")
def expected(repository: Path) -> list[str]:
    engine = repository.parent / "engine"
    options = {"device": "cpu", "ranks": 2, "cache_tokens": 4096, "threads": 1}
    with LLM(engine, deterministic=True, **options) as llm:
        answers = llm.generate(BODY["text_input"], max_tokens=TOKENS, ignore_end=True)
    return answers[0].text.split()


@pytest.fixture(scope="module")
def site(cluster, repository, tmp_path_factory) -> Site:
    return Site(
        cluster, repository, tmp_path_factory.mktemp("site"), ranks=2, nodes=2, max_replicas=1
    )


def engine_of(server: int) -> int:
    (found,) = [
        child for child in children_of(server) if "engine_worker.process" in command_of(child)
    ]
    return found


def test_a_replica_has_a_rank_on_each_of_two_nodes(site, expected):
    assert len(servers()) == 2
    assert len(set(servers().values())) == 2  # the processes of the nodes
    assert all(is_running(engine_of(server)) for server in servers())
    assert site.generate(TOKENS) == expected
    assert "".join(site.stream(TOKENS)).split() == expected


def test_a_killed_rank_is_started_again_by_its_server_or_rank_host(site, expected):
    before = set(servers())
    engines = [engine_of(server) for server in before]
    os.kill(engines[0], signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, engines)))
    wait_for(site.ready, 120)
    assert set(servers()) == before  # Ray need not replace the replica
    assert site.generate(TOKENS) == expected


@pytest.mark.parametrize("number", [0, 1])
def test_a_replica_whose_process_on_a_node_is_killed_is_replaced(site, expected, number):
    before = sorted(servers())
    engines = [engine_of(server) for server in before]
    os.kill(before[number], signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, [*before, *engines])), 120)
    wait_for(lambda: len(servers()) == 2 and site.ready(), 180)
    assert not set(servers()) & set(before)
    assert site.generate(TOKENS) == expected


def test_a_deployment_that_is_deleted_leaves_nothing(site):
    processes = [*servers(), *map(engine_of, servers())]
    serve.delete(NAME)
    wait_for(lambda: not any(map(is_running, processes)), 120)


def test_ranks_that_cannot_be_divided_among_nodes_are_refused():
    from slipstream.ray.serve import Arguments, app

    with pytest.raises(ValueError, match="ranks: 3 cannot be divided equally among 2 nodes"):
        app(Arguments(repository="/models", ranks=3, nodes=2))
    with pytest.raises(ValueError, match="gpus: 3 cannot be divided equally among 2 nodes"):
        app(Arguments(repository="/models", ranks=2, gpus=3, nodes=2))
    assert Arguments(repository="/models", ranks=16, nodes=2).bundle() == {"CPU": 2.0, "GPU": 8}
    assert Arguments(repository="/models", ranks=2, gpus=0, nodes=2).bundle() == {"CPU": 2.0}
