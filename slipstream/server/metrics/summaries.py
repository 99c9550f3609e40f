"""Summaries: quantiles of the latencies of the last minute.

They exist only with `--metrics-config summary_latencies=true`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import ceil
from random import Random

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
WINDOW_SECONDS = 60.0
MAX_OBSERVATIONS = 4096  # per summary; above it, a random observation makes room for a new one


@dataclass(frozen=True)
class SummaryIncrement:
    """The observations of a summary since the last time."""

    count: int
    sum: int
    recent: list[int]  # observations of the last minute, without those that made room


class Summary:
    """Counts all observations and gives quantiles of the recent ones."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._random = Random(0)

    def observe(self, microseconds: int) -> None:
        self.count += 1
        self.sum += microseconds
        self._drop_old()
        if len(self._recent) >= MAX_OBSERVATIONS:
            del self._recent[self._random.randrange(MAX_OBSERVATIONS)]
        self._recent.append((time.monotonic(), microseconds))

    def quantiles(self, wanted: tuple[float, ...]) -> list[float]:
        """Return the quantiles of the last minute; NaN when there is no observation."""
        self._drop_old()
        values = sorted(value for _, value in self._recent)
        if not values:
            return [float("nan")] * len(wanted)
        return [float(values[max(0, ceil(quantile * len(values)) - 1)]) for quantile in wanted]

    def take(self) -> SummaryIncrement:
        """Return the observations since the last call, and clear them."""
        taken = SummaryIncrement(self.count, self.sum, [value for _, value in self._recent])
        self.count = 0
        self.sum = 0
        self._recent.clear()
        return taken

    def add(self, increment: SummaryIncrement) -> None:
        """Add what another process has observed just now."""
        for value in increment.recent:
            self.observe(value)
        self.count += increment.count - len(increment.recent)
        self.sum += increment.sum - sum(increment.recent)

    def _drop_old(self) -> None:
        oldest = time.monotonic() - WINDOW_SECONDS
        for _ in range(bisect_left(self._recent, (oldest, -1))):
            self._recent.popleft()


class Summaries:
    """The summaries of one model, named like Triton's metrics."""

    def __init__(self) -> None:
        self.requests = Summary()
        self.queue = Summary()
        self.compute_input = Summary()
        self.compute_infer = Summary()
        self.compute_output = Summary()
        self.cache_hit = Summary()
        self.cache_miss = Summary()

    def request(self, total_ns: int | None, queue_ns: int) -> None:
        """Record a request. Like Triton's, models with a response cache have no total."""
        if total_ns is not None:
            self.requests.observe(total_ns // 1000)
        self.queue.observe(queue_ns // 1000)

    def compute(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.compute_input.observe(input_ns // 1000)
        self.compute_infer.observe(infer_ns // 1000)
        self.compute_output.observe(output_ns // 1000)
