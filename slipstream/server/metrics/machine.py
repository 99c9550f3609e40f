"""Figures of the machine, under Triton's names: processors, memory, and GPUs where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.server.metrics.families import Family
from slipstream.server.metrics.gpu import Gpus

_PROC = Path("/proc")


class Machine:
    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = gpus or Gpus()
        self._busy, self._all = _processor_time()
        self._utilization = 0.0

    def families(self) -> Iterator[Family]:
        # There is no pool of pinned memory; a dashboard made for Triton still finds the name.
        for kind in ("total", "used"):
            name = f"nv_pinned_memory_pool_{kind}_bytes"
            yield Family(
                name, "gauge", f"Pinned memory pool {kind} memory size, in bytes", [({}, 0)]
            )
        yield Family(
            "nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", [({}, self._cpu())]
        )
        found = memory()
        total, used = found["MemTotal"], found["MemTotal"] - found["MemAvailable"]
        yield Family(
            "nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", [({}, total)]
        )
        yield Family(
            "nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", [({}, used)]
        )
        yield from self._gpus.families()

    def _cpu(self) -> float:
        """The share of processor time in use since the last scrape that was some ticks ago."""
        busy, total = _processor_time()
        if total > self._all:
            self._utilization = (busy - self._busy) / (total - self._all)
            self._busy, self._all = busy, total
        return self._utilization


def _processor_time() -> tuple[int, int]:
    """Ticks spent working, and all ticks, of all processors since the start."""
    fields = [int(word) for word in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]  # idle, and waiting for a disk
    return sum(fields) - idle, sum(fields)


def memory() -> dict[str, int]:
    """As the kernel tells it, in bytes."""
    lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
