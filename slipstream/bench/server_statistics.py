"""What the server counted while a load was measured: requests, and where their time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


class ServerCounts(NamedTuple):
    """Of one model, since the server started. Times are in nanoseconds, summed over requests."""

    inferences: int
    executions: int
    requests: int
    nanoseconds: Mapping[str, int]  # of `success` and of each phase

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
        """As perf_analyzer prints them."""
        parts = {phase: self.average_us(phase) for phase in _PHASES}
        total = self.average_us("success")
        overhead = max(0.0, total - sum(parts.values()))
        shown = " + ".join(
            [
                f"overhead {overhead:.0f} usec",
                *(f"{phase.replace('_', ' ')} {value:.0f} usec" for phase, value in parts.items()),
            ]
        )
        return [
            f"Inference count: {self.inferences}",
            f"Execution count: {self.executions}",
            f"Successful request count: {self.requests}",
            f"Avg request latency: {total:.0f} usec ({shown})",
        ]


def counts_of(document: Mapping[str, Any]) -> ServerCounts:
    """From a statistics document; over gRPC its whole numbers come as text, and zeros are left out."""
    found = document["model_stats"][0]
    times = found.get("inference_stats", {})
    nanoseconds = {name: int(times.get(name, {}).get("ns", 0)) for name in ("success", *_PHASES)}
    return ServerCounts(
        int(found.get("inference_count", 0)),
        int(found.get("execution_count", 0)),
        int(times.get("success", {}).get("count", 0)),
        nanoseconds,
    )
