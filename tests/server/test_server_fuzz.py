"""A whole server under damaged requests of every kind at once; see `fuzzing.py`."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import Attacker, Canary, resident_bytes
from server_peers import Peer, start_ours

# allocators keep some memory; leaking all requests would be ten times this
GROWTH_BYTES = 24 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Peer]:
    peer = start_ours("own", tmp_path)
    try:
        peer.wait_ready()
        yield peer
    finally:
        peer.stop()


def attack(server: Peer, folder: Path, cases: int, warm_up: int, seed: int) -> Attacker:
    attacker = Attacker(seed, server.http_port, server.grpc_port, folder / "configs")
    canary = Canary(server.http_port)
    canary.start()
    try:
        attacker.attack(warm_up)  # fills caches and the allocator's pools
        before = resident_bytes(server.process.pid)
        attacker.attack(cases - warm_up)
        grown = resident_bytes(server.process.pid) - before
    finally:
        attacker.close()
        canary.finish()
    assert canary.streams > 0
    assert grown < GROWTH_BYTES, f"the server grew by {grown >> 20} MiB"
    assert server.process.poll() is None
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.http_port}/v2/health/ready", timeout=10
    ) as answer:
        assert answer.status == 200
    return attacker


def test_a_few_thousand_damaged_requests(server: Peer, tmp_path: Path) -> None:
    attacker = attack(server, tmp_path, 3000, warm_up=600, seed=11)
    assert sum(attacker.answers.values()) == 3000
    expected = (
        "HTTP 200",
        "HTTP 400",
        "HTTP 404",
        "gRPC OK",
        "gRPC INVALID_ARGUMENT",
        "config read",
        "config refused",
    )
    assert [kind for kind in expected if attacker.answers[kind] < 10] == [], attacker.answers


@pytest.mark.slow
def test_two_hundred_thousand_damaged_requests(server: Peer, tmp_path: Path) -> None:
    attacker = attack(server, tmp_path, 200_000, warm_up=20_000, seed=12)
    assert sum(attacker.answers.values()) == 200_000
