"""Streams are whole when the server stops, and a second signal ends it at once."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from pathlib import Path

import httpx
from nginx_site import CLIENTS, Load, Site
from tiny_server import TinyServer, make_repository, wait_for

from gates.table import Row
from gates.traffic import Outcome, expected, new_client, status, stream, until, until_status

_STEP_MS = 20


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    count, tokens = (64, 200) if long else (16, 60)
    repository = make_repository(folder)
    rows += await _first_signal(repository, folder, count, tokens)
    for number in (signal.SIGINT, signal.SIGTERM):
        rows.append(await _second_signal(repository, folder, number))
    rows.append(await asyncio.to_thread(_rolling_restart, folder / "site", 3 if long else 1))


def _rolling_restart(folder: Path, rounds: int) -> Row:
    """Restart two servers behind nginx one after the other, under load."""
    case = (
        f"{rounds} rolling restarts of 2 servers behind nginx"
        if rounds > 1
        else ("rolling restart of 2 servers behind nginx")
    )
    if shutil.which("nginx") is None:
        return Row(case, "nginx is not installed: apt-get install nginx", None)
    folder.mkdir()
    site = Site(folder)
    load = Load(site.url)
    codes = []
    try:
        wait_for(lambda: load.answers >= 2 * CLIENTS)
        for address in [*site.servers] * rounds:
            codes.append(site.restart(address))
            before = load.answers
            wait_for(lambda before=before: load.answers >= before + 4 * CLIENTS)
    finally:
        load.stop()
        site.close()
    failed = len(load.problems)
    found = f"{load.answers - failed} requests whole, {failed} failed, exit codes {codes}"
    if failed:
        found += f"; first: {load.problems[0][:200]}"
    return Row(case, found, not failed and not any(codes))


async def _begin(
    client: httpx.AsyncClient, server: TinyServer, count: int, tokens: int
) -> tuple[list[Outcome], asyncio.Future[list[Outcome]]]:
    outcomes = [Outcome() for _ in range(count)]
    streams = asyncio.gather(
        *(
            stream(client, server, first, tokens, _STEP_MS, outcome)
            for first, outcome in enumerate(outcomes, 1)
        )
    )
    await until(lambda: all(outcome.events for outcome in outcomes))
    return outcomes, streams


async def _first_signal(repository: Path, folder: Path, count: int, tokens: int) -> list[Row]:
    server = TinyServer(repository, folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            _, streams = await _begin(client, server, count, tokens)
            server.process.send_signal(signal.SIGTERM)
            unready = await until_status(client, server, "/v2/health/ready", 400)
            live = await status(client, server, "/v2/health/live")
            late = await stream(client, server, 1, 2, 0)
            found = await streams
        whole = sum(
            outcome.text == expected(first, tokens) and not outcome.cut
            for first, outcome in enumerate(found, 1)
        )
        code = await asyncio.to_thread(server.wait_exit)
        left = server.remaining_files()
    finally:
        server.close()
    return [
        Row(f"SIGTERM with {count} streams", f"{whole} whole", whole == count),
        Row("health after it", f"ready 400 in {unready:.2f} s, live {live}", live == 200),
        Row(
            "a new request after it",
            f"{late.status}, Retry-After {late.retry_after or 'missing'}",
            late.refused,
        ),
        Row("exit", f"code {code}, {len(left)} files left", code == 0 and not left),
    ]


async def _second_signal(repository: Path, folder: Path, number: signal.Signals) -> Row:
    server = TinyServer(repository, folder / "tmp")
    try:
        await asyncio.to_thread(server.wait_started)
        async with new_client() as client:
            outcomes, streams = await _begin(client, server, 4, 2000)
            server.process.send_signal(number)
            await until_status(client, server, "/v2/health/ready", 400)
            begun = time.monotonic()
            server.process.send_signal(number)
            code = await asyncio.to_thread(server.wait_exit)
            seconds = time.monotonic() - begun
            await streams
        cut = sum(outcome.cut for outcome in outcomes)
        left = server.remaining_files()
    finally:
        server.close()
    holds = code == 128 + number and cut == 4 and not left
    found = f"code {code} in {seconds:.2f} s, {cut} of 4 streams cut, {len(left)} files left"
    return Row(f"second {number.name}", found, holds)
