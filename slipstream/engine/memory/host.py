"""The memory of the host that this process may use. No torch here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from slipstream.engine.memory.control_groups import CGROUPS, PROC, find_groups, read_text


class HostMemory(NamedTuple):
    total: int  # bytes of the machine, or of the container if that is less
    available: int  # bytes that can be allocated now without swapping


class _Names(NamedTuple):
    """The names of a control group's files, which differ between versions 1 and 2."""

    limit: str
    usage: str
    reclaimable: str  # a key of memory.stat: file pages that the kernel can drop


_NAMES = {  # by the groups' version
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.max", "memory.current", "inactive_file"),
}


def read_host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """Return the memory of the machine, within the limits of this process's control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = _read_fields(proc / "meminfo")
    total = fields.get("MemTotal:", 0) * 1024 or total
    available = fields.get("MemAvailable:", 0) * 1024 or total
    for folder, version in find_groups("memory", proc, cgroups):
        names = _NAMES[version]
        limit = _read_number(folder / names.limit)
        if limit is None or limit >= total:
            continue
        total = limit
        usage = _read_number(folder / names.usage) or 0
        usage -= _read_fields(folder / "memory.stat").get(names.reclaimable, 0)
        available = min(available, max(0, limit - max(0, usage)))
    return HostMemory(total, available)


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None for the text `max` or no file."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Return the first number of each line by its first word."""
    lines = (line.split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
