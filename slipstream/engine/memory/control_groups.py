"""The control groups that limit this process. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    folder: Path  # may be missing: it has no limit to read then
    version: int  # 1 or 2, which name their files differently


def find_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[ControlGroup]:
    """Return the control groups whose limits of a controller apply, from the root down.

    controller: such as "cpu" or "memory"
    """
    found: list[ControlGroup] = []
    for line in read_text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [ControlGroup(folder, 2) for folder in _down(cgroups, path)]
        elif controller in controllers.split(","):
            found += [ControlGroup(folder, 1) for folder in _down(cgroups / controller, path)]
    return found


def _down(root: Path, path: str) -> list[Path]:
    """Return the folders from the root to a group.

    A container may see its own group as the root, and a longer path in /proc.
    """
    folders = [root]
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return folders


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel; empty if there is none."""
    try:
        return path.read_text()
    except OSError:  # not Linux, or no such control group
        return ""
