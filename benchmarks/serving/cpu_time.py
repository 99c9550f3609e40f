"""CPU time of a server by kind of process, from /proc: it shows which process is the limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from serving.cells import ProcessTime

_TICKS = os.sysconf("SC_CLK_TCK")
Times = dict[tuple[int, int], float]  # (process, thread) → CPU seconds


def process_tree(process: int) -> list[int]:
    """Return a process and its descendants."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += process_tree(int(child))
    return found


def thread_times(process: int) -> Times:
    """Return the CPU seconds of every thread of a process."""
    times: Times = {}
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        times[process, int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return times


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class CpuMeter:
    """Measures the processes of a server from its creation to `read`."""

    def __init__(self, process: int, kind_of: Callable[[int, str], str]) -> None:
        """`kind_of` names the kind of a process by its id and command line."""
        self._processes = {one: kind_of(one, command_line(one)) for one in process_tree(process)}
        self._before = self._times()
        self._began = time.monotonic()

    def _times(self) -> Times:
        found: Times = {}
        for process in self._processes:
            found |= thread_times(process)
        return found

    def read(self) -> list[ProcessTime]:
        seconds = time.monotonic() - self._began
        used = {key: value - self._before.get(key, 0.0) for key, value in self._times().items()}
        kinds: dict[str, list[tuple[int, float]]] = {}
        for (process, _), spent in used.items():
            kinds.setdefault(self._processes[process], []).append((process, spent))
        return [
            ProcessTime(
                kind,
                len({process for process, _ in threads}),
                sum(spent for _, spent in threads),
                max(spent for _, spent in threads) / seconds,
            )
            for kind, threads in kinds.items()
        ]
