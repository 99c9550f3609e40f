"""The cores that this process may use, by its affinity and its control groups. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.engine.memory.control_groups import (
    CGROUPS,
    PROC,
    ControlGroup,
    find_groups,
    read_text,
)


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the cores that this process may use: by its affinity, and by the smallest quota of
    its control groups.
    """
    quotas = (_quota(group) for group in find_groups("cpu", proc, cgroups))
    limits = [quota for quota in quotas if quota is not None]
    return min([float(len(os.sched_getaffinity(0))), *limits])


def _quota(group: ControlGroup) -> float | None:
    """Return the cores that a control group allows; None: all."""
    if group.version == 2:
        words = read_text(group.folder / "cpu.max").split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [read_text(group.folder / name).strip() for name in names]
    try:
        microseconds = int(words[0])
        period = int(words[1])
    except (ValueError, IndexError):
        return None  # no limit
    return microseconds / period if microseconds > 0 and period > 0 else None
