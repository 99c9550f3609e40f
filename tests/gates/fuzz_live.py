"""Damaged connections and requests against a whole server, beside a stream that must not change."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fuzzing import Attacker, Canary, http_request, resident_bytes
from tiny_server import TinyServer, make_repository

from gates.fuzz_mutate import mutate
from gates.smuggling_corpus import corpus
from gates.table import Row

_MOST_GROWTH_MIB = 64
_SILENT_SECONDS = 0.01  # the connection goes on if the server has not answered by then


@dataclass(frozen=True)
class _Found:
    requests: Counter[str]
    connections: Counter[str]
    canary_streams: int
    grown_mib: float


def attack_server(folder: Path, requests: int, connections: int) -> list[Row]:
    folder.mkdir()
    server = TinyServer(make_repository(folder), folder / "tmp")
    problem = ""
    found = _Found(Counter(), Counter(), 0, 0.0)
    try:
        server.wait_started()
        found = _attack(server, folder, requests, connections)
        if server.process.poll() is not None:
            problem = f"the server ended with {server.process.returncode}"
    except AssertionError as error:
        problem = str(error)
    finally:
        server.close()
    tracebacks = sum("Traceback" in line for line in server.lines)
    if tracebacks:
        problem = problem or f"{tracebacks} tracebacks in the log"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.requests.items()))
    ways = ", ".join(f"{count} {kind}" for kind, count in sorted(found.connections.items()))
    grown = found.grown_mib
    beside = f"{found.canary_streams} streams beside it whole, the server grew by {grown:.1f} MiB"
    return [
        Row("a server: HTTP, gRPC and configurations", f"{requests} inputs: {kinds}", not problem),
        Row("a server: connections", f"{connections} inputs: {ways}", not problem),
        Row("the server afterwards", problem or beside, not problem and grown < _MOST_GROWTH_MIB),
    ]


def _attack(server: TinyServer, folder: Path, requests: int, connections: int) -> _Found:
    port = server.ports["HTTPService"]
    grpc_port = server.ports["GRPCInferenceService"]
    attacker = Attacker(21, port, grpc_port, folder / "configs")
    canary = Canary(port)
    canary.start()
    try:
        attacker.attack(requests // 10)  # fills caches and the allocator's pools
        before = resident_bytes(server.process.pid)
        attacker.attack(requests - requests // 10)
        ways = _connect(port, connections)
        grown = resident_bytes(server.process.pid) - before
    finally:
        attacker.close()
        canary.finish()
    assert canary.streams, "the canary read no stream"
    return _Found(attacker.answers, ways, canary.streams, grown / 2**20)


def _connect(port: int, count: int) -> Counter[str]:
    """Open connections that send something damaged, in pieces, and end in different ways."""
    chance = random.Random(22)
    whole = [b"".join(pieces) for pieces in corpus().values()]
    ways: Counter[str] = Counter()
    for _ in range(count):
        seed = chance.choice(whole) if chance.random() < 0.5 else http_request(chance)
        data = mutate(seed, whole, chance)
        ways[_send(port, data, chance)] += 1
    return ways


def _send(port: int, data: bytes, chance: random.Random) -> str:
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        cut = chance.randrange(len(data) + 1)
        end = chance.choice(("closed", "reset", "half-closed", "read"))
        with suppress(OSError):  # the server has closed
            for piece in (data[:cut], data[cut:]):
                connection.sendall(piece)
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif end == "half-closed":
                connection.shutdown(socket.SHUT_WR)
            if end in ("half-closed", "read"):
                connection.settimeout(_SILENT_SECONDS)
                with suppress(TimeoutError):
                    while connection.recv(1 << 16):
                        pass
    return end
