"""A million damaged inputs: what reads bytes from outside accepts them, or refuses them in its words."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from pathlib import Path

from gates.fuzz_coverage import is_installed, run_guided
from gates.fuzz_live import attack_server
from gates.fuzz_mutate import mutate
from gates.fuzz_targets import Target, targets
from gates.table import Row

_QUICK_SHARE = 1 / 400  # of the inputs of the long form
_MOST_CPU_SECONDS = 6.0  # of one input; a chat template may use 5
_LIVE_REQUESTS = 20_000
_LIVE_CONNECTIONS = 10_000
_GUIDED_RUNS = 20_000
_GUIDED_SECONDS = 20


async def run(folder: Path, long: bool, rows: list[Row]) -> None:
    await asyncio.to_thread(_run, folder, long, rows)


def _run(folder: Path, long: bool, rows: list[Row]) -> None:
    share = 1.0 if long else _QUICK_SHARE
    known = targets(folder)
    for target in known:
        rows.append(_attack(target, round(target.inputs * share), seed=int(long)))
    if not long:
        requests, connections = 400, 200
    else:
        requests, connections = _LIVE_REQUESTS, _LIVE_CONNECTIONS
    rows += attack_server(folder / "live", requests, connections)
    total = requests + connections + sum(round(target.inputs * share) for target in known)
    if long:
        guided, tried = _guided(known, folder)
        rows.append(guided)
        total += tried
    rows.append(Row("inputs in all", f"{total:,}", total >= 1_000_000 or not long))


def _attack(target: Target, count: int, seed: int) -> Row:
    chance = random.Random(zlib.crc32(target.name.encode()) + seed)
    accepted = 0
    slowest = 0.0
    problems: list[str] = []
    for _ in range(count):
        data = mutate(chance.choice(target.seeds), target.seeds, chance)
        begun = time.thread_time()
        try:
            accepted += target.read(data)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error)[:100]} for {data[:120]!r}")
        slowest = max(slowest, time.thread_time() - begun)
    text = f"{count:,} inputs, {accepted:,} accepted, the slowest took {1000 * slowest:.0f} ms"
    if problems:
        text += f"; {len(problems)} failed, first: {problems[0]}"
    return Row(target.name, text, not problems and slowest < _MOST_CPU_SECONDS)


def _guided(known: list[Target], folder: Path) -> tuple[Row, int]:
    """Run every target under atheris for a while. Return its row and the number of inputs."""
    if not is_installed():
        return Row("guided by coverage", "atheris is not installed: pip install atheris", None), 0
    problems = []
    total = 0
    for target in known:
        found = run_guided(target.name, target.seeds, folder, _GUIDED_RUNS, _GUIDED_SECONDS)
        total += found.inputs
        if found.problem:
            problems.append(f"{target.name}: {found.problem}")
    text = f"{total:,} inputs, for {len(known)} targets"
    if problems:
        text += f"; {'; '.join(problems)}"
    return Row("guided by coverage (atheris)", text, not problems), total
