"""The server's own statistics of a load: requests, and the time in each of their phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


class ServerCounts(NamedTuple):
    """The counters of one model since the server started, or between two readings."""

    inferences: int
    executions: int
    requests: int
    nanoseconds: Mapping[str, int]  # total time of `success` and of each phase

    def since(self, before: ServerCounts) -> ServerCounts:
        return ServerCounts(
            self.inferences - before.inferences,
            self.executions - before.executions,
            self.requests - before.requests,
            {name: value - before.nanoseconds[name] for name, value in self.nanoseconds.items()},
        )

    def average_us(self, phase: str) -> float:
        return self.nanoseconds[phase] / 1000 / self.requests if self.requests else 0.0

    def lines(self) -> list[str]:
        """Return the lines that perf_analyzer prints."""
        parts = {phase: self.average_us(phase) for phase in PHASES}
        total = self.average_us("success")
        overhead = max(0.0, total - sum(parts.values()))
        terms = [f"overhead {overhead:.0f} usec"]
        terms += [f"{phase.replace('_', ' ')} {value:.0f} usec" for phase, value in parts.items()]
        shown = " + ".join(terms)
        return [
            f"Inference count: {self.inferences}",
            f"Execution count: {self.executions}",
            f"Successful request count: {self.requests}",
            f"Avg request latency: {total:.0f} usec ({shown})",
        ]


def read_counts(document: Mapping[str, Any]) -> ServerCounts:
    """Read a statistics document. Over gRPC, numbers are texts and zeros are left out."""
    found = document["model_stats"][0]
    times = found.get("inference_stats", {})
    nanoseconds = {name: int(times.get(name, {}).get("ns", 0)) for name in ("success", *PHASES)}
    return ServerCounts(
        int(found.get("inference_count", 0)),
        int(found.get("execution_count", 0)),
        int(times.get("success", {}).get("count", 0)),
        nanoseconds,
    )
