"""The state of a process in /proc: whether a signal has stopped it, its CPU time and its age."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STOPPED = "T"  # a debugger's stop is "t"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# positions in /proc/ID/stat behind the name of the program
_STATE = 0
_USER_TICKS = 11
_SYSTEM_TICKS = 12
_START_TICKS = 19  # since the machine's start


@dataclass(frozen=True, slots=True)
class ProcessState:
    stopped: bool = False  # by SIGSTOP or SIGTSTP, until SIGCONT
    cpu_seconds: float = 0.0  # of all threads since the start


def read_state(process_id: int) -> ProcessState:
    """Return the state of a process; of one that has ended, or without /proc, that of a new one."""
    try:
        fields = _read_fields(Path(f"/proc/{process_id}"))
    except OSError:
        return ProcessState()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessState(fields[_STATE] == _STOPPED, ticks / _TICKS_A_SECOND)


def read_age(folder: Path = Path("/proc/self")) -> float:
    """Return the seconds since the start of the process that has this folder of /proc."""
    began = int(_read_fields(folder)[_START_TICKS]) / _TICKS_A_SECOND
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def _read_fields(folder: Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()
