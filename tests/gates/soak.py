"""Mixed traffic for a long time: memory, files and threads of the processes do not grow."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import httpx
from real_server import RealServer
from tiny_server import children_of, command_of, is_running

from gates.mixed_traffic import MixedTraffic
from gates.site import start_site, write_site
from gates.table import Row

_CLIENTS = 12
_MOST_MIB_PER_HOUR = 8.0
_LEAST_GROWTH_MIB = 6.0  # between quarters: single requests move memory by this much
_MOST_MIB_QUICK = 40.0  # in a quick run: caches still fill
_MOST_DRIFT = 1.0  # of files and threads, between the first and the last quarter of the run
_SAMPLES = 120
_SAMPLES_SHOWN = 10  # the interval of the samples that a long run shows
_SILENT_SECONDS = 100.0
_EXIT_SECONDS = 5
_MOST_EXIT_SECONDS = _EXIT_SECONDS + 10.0
_MOST_SECONDS_AFTER = 10.0  # until the engines are idle after the last client
_CHECK_SECONDS = 3.0  # an idle engine checks its blocks within this time, and ends if they differ


@dataclass(frozen=True)
class _Sample:
    seconds: float
    memory_mib: float  # RssAnon
    files: int
    threads: int


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    await _soak(folder, 3600.0 if long else 20.0, long, rows)


async def _soak(folder: Path, seconds: float, long: bool, rows: list[Row]) -> None:
    repository = write_site(folder)
    server = start_site(repository, folder / "server", f"--exit-timeout-secs={_EXIT_SECONDS}")
    try:
        await asyncio.to_thread(server.wait)
        before = set(_engines(server.process_id))
        traffic = MixedTraffic(server)
        clients = [
            asyncio.ensure_future(traffic.use(random.Random(number))) for number in range(_CLIENTS)
        ]
        clients.append(asyncio.ensure_future(traffic.reload(repository, 30.0 if long else 4.0)))
        await asyncio.sleep(seconds / 4)  # caches fill
        samples = await _sample(server.process_id, seconds * 3 / 4)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients)
        await traffic.close()
        rows += [_answers(traffic), *_growth(samples, long), await _wait_cleared(server)]
        await asyncio.sleep(_CHECK_SECONDS)
        rows.append(_unbroken(server, before))
        rows.append(await asyncio.to_thread(_end, server.process_id))
    finally:
        await asyncio.to_thread(server.close)


def _end(process: int) -> Row:
    """The server ends soon after its signal, whatever it has done before."""
    begun = time.monotonic()
    os.kill(process, signal.SIGTERM)
    while is_running(process) and time.monotonic() < begun + 10 * _MOST_EXIT_SECONDS:
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    if is_running(process):
        os.kill(process, signal.SIGKILL)
    return Row("exit after SIGTERM", f"{seconds:.1f} s", seconds < _MOST_EXIT_SECONDS)


def _engines(server: int) -> list[int]:
    return [child for child in children_of(server) if "engine_worker" in command_of(child)]


async def _sample(server: int, seconds: float) -> dict[str, list[_Sample]]:
    """Return samples of the server and of the engine that is not loaded again meanwhile."""
    processes = [server, *_engines(server)]
    samples: dict[int, list[_Sample]] = {process: [] for process in processes}
    begun = time.monotonic()
    for number in range(_SAMPLES):
        await asyncio.sleep(seconds / _SAMPLES)
        for process in processes:
            with suppress(FileNotFoundError, ProcessLookupError):
                samples[process].append(_measure(process, time.monotonic() - begun))
        if number % _SAMPLES_SHOWN == 0 and seconds > _SILENT_SECONDS:
            print(f"soak: {samples[server][-1]}", file=sys.stderr, flush=True)
    # Of the processes that were there at the beginning, one has not been loaded again. While the
    # other one was, there may have been three.
    lasting = set(processes[1:]) & set(_engines(server))
    names = ("engine", "other engine", "third engine")
    engines = zip(names, (samples[process] for process in sorted(lasting)), strict=False)
    return {"server": samples[server], **dict(engines)}


def _measure(process: int, seconds: float) -> _Sample:
    status = Path(f"/proc/{process}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", status)}
    files = len(os.listdir(f"/proc/{process}/fd"))
    return _Sample(seconds, numbers["RssAnon"] / 1024, files, numbers["Threads"])


def _answers(traffic: MixedTraffic) -> Row:
    kinds = traffic.right | traffic.wrong
    right, wrong = traffic.right.total(), traffic.wrong.total()
    found = f"{right} right, {wrong} wrong, of {len(kinds)} kinds"
    found += f", {traffic.right['reload']} reloads"
    for kind, problem in traffic.first_wrong.items():
        found += f"; {kind}, {traffic.wrong[kind]} times, first: {problem}"
    return Row("answers", found, wrong == 0 and min(kinds.values()) > 0)


def slope(points: list[tuple[float, float]]) -> float:
    """Return the median of the slopes between pairs of points: single peaks do not change it."""
    return statistics.median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(points, 2)
    )


def _growth(samples: dict[str, list[_Sample]], long: bool) -> list[Row]:
    """In a quick run memory has not settled, so that only a leak of many megabytes is seen."""
    rows = []
    if len(samples) == 1:
        rows.append(Row("engines", "none of the first ones is left", False))
    for name, found in samples.items():
        seconds = found[-1].seconds - found[0].seconds
        points = [(one.seconds, one.memory_mib) for one in found]
        per_hour = slope(points) * 3600
        first, last = quarters([value for _, value in points])
        growth = last - first
        text = f"{points[0][1]:.1f}, at the end {points[-1][1]:.1f} MiB; slope {per_hour:+.1f} MiB"
        text += f" an hour; last quarter against the first {growth:+.1f} MiB"
        most = max(_MOST_MIB_PER_HOUR * seconds / 3600, _LEAST_GROWTH_MIB)
        holds = per_hour <= _MOST_MIB_PER_HOUR and growth <= most
        rows.append(
            Row(f"RssAnon of the {name}", text, holds if long else growth < _MOST_MIB_QUICK)
        )
        for what in ("files", "threads"):
            values = [float(getattr(one, what)) for one in found]
            first, last = quarters(values)
            text = f"{min(values):.0f} to {max(values):.0f}; median of the first quarter "
            text += f"{first:.1f}, of the last {last:.1f}"
            bound = _MOST_DRIFT if long else 2.0 * _CLIENTS
            rows.append(Row(f"{what} of the {name}", text, last - first <= bound))
    return rows


def quarters(values: list[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last quarter."""
    count = max(1, len(values) // 4)
    return statistics.median(values[:count]), statistics.median(values[-count:])


async def _wait_cleared(server: RealServer) -> Row:
    """Wait until the engines have seen that the last clients have left."""
    deadline = time.monotonic() + _MOST_SECONDS_AFTER
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            row = _cleared((await client.get(f"http://{server.metrics}/metrics")).text)
            if row.holds or time.monotonic() > deadline:
                return row
            await asyncio.sleep(0.1)


def _cleared(metrics: str) -> Row:
    """All requests have ended, and all blocks are free."""
    blocks: dict[str, list[float]] = {"used": [], "free": [], "max": []}
    for kind, value in re.findall(r'kv_cache_block_type="(\w+)"[^\n]*\} (\S+)', metrics):
        if kind in blocks:
            blocks[kind].append(float(value))
    running = re.findall(r"^slipstream_requests_running\{[^\n]*\} (\S+)", metrics, re.MULTILINE)
    left = sum(map(float, running))
    found = f"{left:.0f} requests run, {sum(blocks['used']):.0f} blocks are used, "
    found += f"{sum(blocks['free']):.0f} of {sum(blocks['max']):.0f} are free"
    exact = bool(running and blocks["max"]) and blocks["free"] == blocks["max"]
    return Row("at the end", found, left == 0 and not any(blocks["used"]) and exact)


def _unbroken(server: RealServer, before: set[int]) -> Row:
    """An engine that finds a block without an owner, or with two, ends, and the log says so."""
    same = len(before & set(_engines(server.process_id)))
    bad = [line for line in server.log().splitlines() if line.startswith("E")]
    text = f"{same} engine is the first one, the other was loaded again, {len(bad)} errors logged"
    if bad:
        text += f"; first: {bad[0][:200]}"
    return Row("integrity check of the idle engines", text, same == 1 and not bad)
