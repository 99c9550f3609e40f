"""The memory of the host that this process may use. No torch here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    total: int  # bytes of the machine, or of the container if that is less
    available: int  # bytes that can be allocated now without swapping


class _Group(NamedTuple):
    """The names of a control group's files, which differ between versions 1 and 2."""

    limit: str
    usage: str
    reclaimable: str  # a key of memory.stat: file pages that the kernel can drop


_VERSION_1 = _Group("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Group("memory.max", "memory.current", "inactive_file")


def read_host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """Return the memory of the machine, within the limits of this process's control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = _read_fields(proc / "meminfo")
    total = fields.get("MemTotal:", 0) * 1024 or total
    available = fields.get("MemAvailable:", 0) * 1024 or total
    for folder, names in _groups(proc, cgroups):
        limit = _read_number(folder / names.limit)
        if limit is None or limit >= total:
            continue
        total = limit
        usage = _read_number(folder / names.usage) or 0
        usage -= _read_fields(folder / "memory.stat").get(names.reclaimable, 0)
        available = min(available, max(0, limit - max(0, usage)))
    return HostMemory(total, available)


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, _Group]]:
    """Return the folders of the control groups that limit this process, from the root down."""
    found: list[tuple[Path, _Group]] = []
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [(folder, _VERSION_2) for folder in _down(cgroups, path)]
        elif "memory" in controllers.split(","):
            found += [(folder, _VERSION_1) for folder in _down(cgroups / "memory", path)]
    return found


def _down(root: Path, path: str) -> list[Path]:
    """Return the folders from the root to a group.

    A container may see its own group as the root. Missing folders have no limit to read.
    """
    folders = [root]
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return folders


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or no such control group
        return ""


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None for the text `max` or no file."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_fields(path: Path) -> dict[str, int]:
    """Return the first number of each line by its first word."""
    lines = (line.split() for line in _read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
