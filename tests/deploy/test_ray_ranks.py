"""A replica of Ray Serve whose engine has two ranks, on CPUs.

VENV/bin/pytest -m cluster tests/deploy/test_ray_ranks.py
"""

from __future__ import annotations

import os
import signal

import httpx
import pytest
from test_ray import NAME, Site, cluster, repository, serve, servers
from tiny_server import children_of, command_of, is_running, wait_for

pytestmark = pytest.mark.cluster
__all__ = ["cluster", "repository"]


def engines(server: int) -> list[int]:
    return [child for child in children_of(server) if "engine_worker.process" in command_of(child)]


def test_a_replica_has_two_ranks_and_recovers_when_one_is_killed(
    cluster, repository, tmp_path_factory
):
    site = Site(cluster, repository, tmp_path_factory.mktemp("site"), ranks=2, max_replicas=1)
    ((server, _),) = servers().items()
    before = engines(server)
    assert len(before) == 2
    expected = site.generate(64)
    assert len(expected) == 64
    os.kill(before[1], signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, before)))
    wait_for(lambda: len(engines(server)) == 2 and site.ready(), 120)
    assert list(servers()) == [server]  # Ray need not replace the replica
    assert site.generate(64) == expected
    metrics = httpx.get(f"{site.url}/metrics", timeout=30).text
    assert "nv_trt_llm_request_metrics" in metrics
    after = engines(server)
    serve.delete(NAME)
    wait_for(lambda: not servers() and not any(map(is_running, after)), 120)
