"""The rows of a gate: what was tried, what was found, and whether it holds."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WORDS = {True: "yes", False: "NO", None: "not tried"}


@dataclass(frozen=True)
class Row:
    case: str
    found: str
    holds: bool | None  # None: not tried, because the machine lacks a program


async def attempt(rows: list[Row], work: Awaitable[Row | list[Row]]) -> None:
    """Append what a case finds. An exception in it is a row, and the cases after it are tried."""
    try:
        found = await work
    except Exception as error:
        traceback.print_exc()
        case = getattr(work, "__qualname__", "a case").strip("_").replace("_", " ")
        text = f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:500]
        found = Row(case, text, False)
    rows += found if isinstance(found, list) else [found]


def show(name: str, rows: Sequence[Row], seconds: float) -> str:
    """Return a Markdown table with its date, machine and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    day = time.strftime("%Y-%m-%d")
    lines = [
        f"{name}: {day}, commit {commit or 'unknown'}, {cores} cores, Python "
        f"{platform.python_version()}, {seconds:.0f} s",
        "",
        "| case | found | holds |",
        "|---|---|---|",
    ]
    lines += [f"| {row.case} | {row.found} | {_WORDS[row.holds]} |" for row in rows]
    return "\n".join(lines)


def summary(found: Mapping[str, Sequence[Row]]) -> str:
    """Return a line with what held, what did not, and what was not tried."""
    rows = [(f"{name}: {row.case}", row.holds) for name, some in found.items() for row in some]
    failed = [case for case, holds in rows if holds is False]
    not_tried = [case for case, holds in rows if holds is None]
    parts = [f"{sum(holds is True for _, holds in rows)} rows hold"]
    if failed:
        parts.append(f"{len(failed)} do NOT hold ({'; '.join(failed)})")
    if not_tried:
        parts.append(f"{len(not_tried)} not tried ({'; '.join(not_tried)})")
    return ", ".join(parts)
