"""More requests than the server can run: it stays responsive, and goes on as fast as it can."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
from tiny_server import TinyServer, make_repository

from gates.health_watch import HealthWatch
from gates.table import Row
from gates.traffic import Outcome, expected, new_client, stream

_STEP_MS = 40
_TOKENS = 25  # of an answer: a second
_ROWS = 64  # of the scripted engine
_TRIES = 3
_QUEUE = _ROWS  # requests that may wait, of the server with a bound: all rows may end in one step
_MOST_HEALTH_SECONDS = 0.1  # median
_LEAST_GOODPUT = 0.9  # of that without overload


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    seconds, times, idle = (30.0, 10, 1000) if long else (4.0, 4, 100)

    async def unbounded(place: Path) -> list[Row]:
        return await _without_bound(place, seconds, times, idle)

    async def bounded(place: Path) -> list[Row]:
        return await _with_bound(place, seconds, times)

    rows += await _repeat(unbounded, folder / "unbounded")
    rows += await _repeat(bounded, folder / "bounded")


async def _repeat(measure: Callable[[Path], Awaitable[list[Row]]], folder: Path) -> list[Row]:
    """Measure again if a row does not hold: other work may disturb one of two loads."""
    for tries in range(_TRIES):
        rows = await measure(folder.with_name(f"{folder.name}{tries}"))
        if all(row.holds for row in rows):
            break
    return rows


async def _without_bound(folder: Path, seconds: float, times: int, idle: int) -> list[Row]:
    """Clients beyond the capacity, beside those that are slow or leave."""
    folder.mkdir()
    server = TinyServer(make_repository(folder, "rows"), folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            peak = await _find_peak(client, server, seconds)
            slow = [_send_slowly(server) for _ in range(idle)]
            slow += [_read_slowly(server) for _ in range(idle // 10)]
            disconnecting = asyncio.ensure_future(_leave(client, server))
            with HealthWatch(server.ports["HTTPService"]) as health:
                loaded, outcomes = await _overload(client, server, times, seconds)
            disconnecting.cancel()
            for connection in slow:
                connection.close()
            after = await stream(client, server, 5, 3, 0)
    finally:
        server.close()
    right = [one for one in outcomes if one.status == 200 and one.text == expected(5, _TOKENS)]
    refused = sum(outcome.refused for outcome in outcomes)
    other = Counter(
        f"{one.status} {one.error or one.text}"[:60]
        for one in outcomes
        if not (one.refused or (one.status == 200 and one.text == expected(5, _TOKENS)))
    )
    beside = f"{idle} slow writers, {idle // 10} slow readers and disconnecting clients"
    return [
        Row(
            f"{times} × capacity beside {beside}",
            f"{loaded:.1f} answers a second, at most {peak:.1f} before: {loaded / peak:.0%}",
            loaded >= _LEAST_GOODPUT * peak,
        ),
        Row(
            "answers",
            f"{len(right)} of {len(outcomes)} right, {refused} refused with 503, "
            f"{other.total()} other{f': {dict(other.most_common(3))}' if other else ''}",
            not other,
        ),
        _health("health meanwhile", health.seconds),
        Row("a request after it", f"{after.status}: {after.text}", after.text == "6 7 8"),
    ]


def _health(case: str, seconds: list[float]) -> Row:
    median = statistics.median(seconds)
    text = f"median {1000 * median:.0f} ms, slowest {1000 * max(seconds):.0f} ms of {len(seconds)}"
    return Row(case, text, median <= _MOST_HEALTH_SECONDS)


async def _with_bound(folder: Path, seconds: float, times: int) -> list[Row]:
    """The queue is full most of the time: clients come again after the Retry-After seconds."""
    folder.mkdir()
    repository = make_repository(folder, "rows")
    config = repository / "tensorrt_llm" / "config.pbtxt"
    policy = f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {_QUEUE} }}"
    text = config.read_text()
    assert "dynamic_batching {" in text
    config.write_text(text.replace("dynamic_batching {", policy, 1))
    server = TinyServer(repository, folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            peak = await _find_peak(client, server, seconds)
            with HealthWatch(server.ports["HTTPService"]) as health:
                loaded, outcomes = await _overload(client, server, times, seconds)
    finally:
        server.close()
    right = [one for one in outcomes if one.status == 200 and one.text == expected(5, _TOKENS)]
    refused = [one for one in outcomes if one.refused]
    other = len(outcomes) - len(right) - len(refused)
    case = f"{times} × capacity with max_queue_size {_QUEUE}"
    return [
        Row(
            case,
            f"{loaded:.1f} answers a second, at most {peak:.1f} before: {loaded / peak:.0%}",
            loaded >= _LEAST_GOODPUT * peak,
        ),
        Row(
            "answers",
            f"{len(right)} right, {len(refused)} refused with 503 and Retry-After, {other} other",
            bool(right) and bool(refused) and not other,
        ),
        _health("health meanwhile", health.seconds),
    ]


async def _find_peak(client: httpx.AsyncClient, server: TinyServer, seconds: float) -> float:
    """Return the most answers a second, of loads from half the rows to all, which none is refused."""
    await _load(client, server, _ROWS, 2.0)  # connections and caches are warm
    found = [
        (await _load(client, server, clients, seconds))[0]
        for clients in (_ROWS // 2, _ROWS, _ROWS + _ROWS // 4)
    ]
    return max(found)


async def _overload(
    client: httpx.AsyncClient, server: TinyServer, times: int, seconds: float
) -> tuple[float, list[Outcome]]:
    """Return the most answers a second of two loads, as the peak is that of several; all answers."""
    first, outcomes = await _load(client, server, _ROWS * times, seconds / 2)
    second, more = await _load(client, server, _ROWS * times, seconds / 2)
    return max(first, second), outcomes + more


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
            outcome = await stream(client, server, 5, _TOKENS, _STEP_MS)
            outcomes.append(outcome)
            if outcome.refused:
                await asyncio.sleep(min(float(outcome.retry_after), end - time.monotonic()))

    await asyncio.gather(*(repeat() for _ in range(clients)))
    answered = [outcome for outcome in outcomes if outcome.status == 200]
    last = max(outcome.ended for outcome in answered)
    return len(answered) / (last - begun), outcomes


def _send_slowly(server: TinyServer) -> socket.socket:
    """Return a connection that sends a part of a request only."""
    connection = socket.create_connection(("127.0.0.1", server.ports["HTTPService"]))
    connection.sendall(b"POST /v2/models/counter/generate HTTP/1.1\r\nHost: localhost\r\n")
    return connection


def _read_slowly(server: TinyServer) -> socket.socket:
    """Return a connection that does not read the statistics that it asks for again and again."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.ports["HTTPService"]))
    connection.sendall(b"GET /v2/models/stats HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    return connection


async def _leave(client: httpx.AsyncClient, server: TinyServer) -> None:
    """Begin a stream ten times a second and leave it."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await stream(client, server, 5, 1000, _STEP_MS)
