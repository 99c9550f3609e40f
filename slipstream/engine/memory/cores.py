"""The cores that this process may use, by its affinity and its control group. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> float:
    """Return the cores that this process may use: by its affinity and by a container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _quota(cgroups)
    return cores if quota is None else min(cores, quota)


def _quota(cgroups: Path) -> float | None:
    """Return the cores that the control group allows; None: all."""
    try:
        if (second := cgroups / "cpu.max").exists():
            words = second.read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [(cgroups / "cpu" / name).read_text().strip() for name in names]
        microseconds = int(words[0])
        period = int(words[1])
    except (OSError, ValueError, IndexError):
        return None  # no limit, or no control groups
    return microseconds / period if microseconds > 0 and period > 0 else None
