"""What the kernel says about a process: whether a signal has stopped it, and its CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STOPPED = "T"  # a debugger's stop is "t"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# positions in /proc/ID/stat behind the name of the program
_STATE = 0
_USER_TICKS = 11
_SYSTEM_TICKS = 12


@dataclass(frozen=True, slots=True)
class ProcessState:
    stopped: bool = False  # by SIGSTOP or SIGTSTP, until SIGCONT
    cpu_seconds: float = 0.0  # of all threads since the start


def read_state(process_id: int) -> ProcessState:
    """Return the state of a process; of one that has ended, or without /proc, that of a new one."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return ProcessState()
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessState(fields[_STATE] == _STOPPED, ticks / _TICKS_A_SECOND)
