"""More requests than the server can run: it stays responsive, and goes on as fast as it can."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from contextlib import suppress
from pathlib import Path

import httpx
from tiny_server import TinyServer, make_repository

from gates.table import Row
from gates.traffic import Outcome, expected, new_client, stream

_STEP_MS = 40
_TOKENS = 25  # of an answer: a second
_ROWS = 64  # of the scripted engine
_MOST_HEALTH_SECONDS = 0.1  # median
_LEAST_GOODPUT = 0.9  # of that without overload


async def run(folder: Path, long: bool) -> list[Row]:
    seconds, times, idle = (30.0, 10, 1000) if long else (6.0, 4, 100)
    server = TinyServer(make_repository(folder, "rows"), folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            await _load(client, server, _ROWS, 2.0)  # connections and caches are warm
            peak, _ = await _load(client, server, _ROWS, seconds)
            held = [_open_slowly(server) for _ in range(idle)]
            leavers = asyncio.ensure_future(_leave(client, server))
            watching = asyncio.ensure_future(_watch_health(client, server))
            loaded, outcomes = await _load(client, server, _ROWS * times, seconds)
            leavers.cancel()
            watching.cancel()
            health = await watching
            for connection in held:
                connection.close()
            after = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    wrong = [one for one in outcomes if one.status == 200 and one.text != expected(5, _TOKENS)]
    refused = sum(outcome.refused for outcome in outcomes)
    median = statistics.median(health)
    return [
        Row(
            f"{times} × capacity beside {idle} slow connections and leavers",
            f"{loaded:.1f} answers a second, {peak:.1f} at capacity: {loaded / peak:.0%}",
            loaded >= _LEAST_GOODPUT * peak,
        ),
        Row(
            "answers",
            f"{len(outcomes) - len(wrong)} of {len(outcomes)} right, {refused} refused with 503",
            not wrong,
        ),
        Row(
            "health meanwhile",
            f"median {1000 * median:.0f} ms, slowest {1000 * max(health):.0f} ms of {len(health)}",
            median <= _MOST_HEALTH_SECONDS,
        ),
        Row("a request after it", f"{after.status}: {after.text}", after.text == "6 7 8"),
    ]


async def _load(
    client: httpx.AsyncClient, server: TinyServer, clients: int, seconds: float
) -> tuple[float, list[Outcome]]:
    """Keep this many requests in flight; return the answers a second, and all of them.

    Answers count from the time at which the rows are full until the time is over.
    """
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    end = begun + seconds

    async def repeat() -> None:
        while time.monotonic() < end:
            outcomes.append(await stream(client, server, 5, _TOKENS, _STEP_MS))

    await asyncio.gather(*(repeat() for _ in range(clients)))
    last = max(outcome.ended for outcome in outcomes)
    return len(outcomes) / (last - begun), outcomes


def _open_slowly(server: TinyServer) -> socket.socket:
    """Return a connection that sends a part of a request only."""
    connection = socket.create_connection(("127.0.0.1", server.ports["HTTPService"]))
    connection.sendall(b"POST /v2/models/counter/generate HTTP/1.1\r\nHost: localhost\r\n")
    return connection


async def _leave(client: httpx.AsyncClient, server: TinyServer) -> None:
    """Begin a stream ten times a second and leave it."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await stream(client, server, 5, 1000, _STEP_MS)


async def _watch_health(client: httpx.AsyncClient, server: TinyServer) -> list[float]:
    """Return how long each answer took, until this is cancelled."""
    found: list[float] = []
    with suppress(asyncio.CancelledError):
        while True:
            begun = time.monotonic()
            response = await client.get(f"{server.url}/v2/health/ready")
            assert response.status_code in (200, 400)
            found.append(time.monotonic() - begun)
            await asyncio.sleep(0.05)
    return found
