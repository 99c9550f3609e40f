"""Find the knee of a server: the highest load that meets limits of latency.

The load is doubled until a limit is broken, and the interval before that is then halved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.bench.llm_metrics import PERCENTILES, LlmMetrics

METRICS = {
    "ttft": "time_to_first_token",
    "itl": "inter_token_latency",
    "latency": "request_latency",
}
STATISTICS = ("avg", *(f"p{percent}" for percent in PERCENTILES), "max")
RATE_TOLERANCE = 0.05  # a rate is found to within this share
_OBJECTIVE = re.compile(r"(?P<name>\w+)(?:\.(?P<statistic>\w+))?=(?P<limit>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Objective:
    """A limit of one statistic of a latency."""

    name: str  # key of METRICS
    statistic: str
    limit: float  # ms

    @property
    def option(self) -> str:
        return f"{self.name}.{self.statistic}"

    @property
    def streamed(self) -> bool:
        """Return whether only streams have this latency."""
        return self.name != "latency"

    @property
    def text(self) -> str:
        return f"{self.option} <= {self.limit:g} ms"

    def measured(self, metrics: LlmMetrics) -> float | None:
        """Return the latency in ms; None if no answer has it: one token has no ITL."""
        found = metrics.by_name().get(METRICS[self.name])
        return None if found is None else found.statistics[self.statistic]


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Return the limits of a text such as `ttft=500,itl.p90=50`. Raises ValueError."""
    found = []
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None or match["name"] not in METRICS:
            raise ValueError(
                f"'{part}' is no limit: write NAME=MILLISECONDS or NAME.STATISTIC=MILLISECONDS, "
                f"with a name of {', '.join(METRICS)}"
            )
        statistic = match["statistic"] or "p99"
        if statistic not in STATISTICS:
            raise ValueError(f"'{part}': the statistic must be one of {', '.join(STATISTICS)}")
        found.append(Objective(match["name"], statistic, float(match["limit"])))
    return tuple(found)


def broken(objectives: Sequence[Objective], metrics: LlmMetrics) -> list[str]:
    """Return the limits that a measurement exceeds, each with the measured value."""
    found = []
    for objective in objectives:
        value = objective.measured(metrics)
        if value is not None and value > objective.limit:
            found.append(f"{objective.option} {value:,.1f} ms > {objective.limit:g} ms")
    return found


def find_knee(
    meets: Callable[[float], bool], first: float, most: float, *, whole: bool
) -> float | None:
    """Return the highest load for which `meets` is true, or None if it is false for the first.

    first: the load to begin with; most: the highest to try
    whole: loads are whole numbers; else the result is within RATE_TOLERANCE of the knee
    """
    if not meets(first):
        return None
    good = first
    bad = None
    while bad is None and good < most:
        tried = min(2 * good, most)
        if meets(tried):
            good = tried
        else:
            bad = tried
    while bad is not None and bad - good > (1 if whole else RATE_TOLERANCE * good):
        tried = (good + bad) // 2 if whole else (good + bad) / 2
        if meets(tried):
            good = tried
        else:
            bad = tried
    return good
