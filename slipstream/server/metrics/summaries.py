"""Quantiles of how long requests took over the last minute (`--metrics-config
summary_latencies=true`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from math import ceil
from random import Random

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
WINDOW_SECONDS = 60.0
MOST_KEPT = 4096  # observations; beyond them a random part stands for all


class Summary:
    """Counts for ever, quantiles of what is recent."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._random = Random(0)

    def observe(self, microseconds: int) -> None:
        self.count += 1
        self.sum += microseconds
        self._forget()
        if len(self._recent) >= MOST_KEPT:
            del self._recent[self._random.randrange(MOST_KEPT)]
        self._recent.append((time.monotonic(), microseconds))

    def quantiles(self, wanted: tuple[float, ...]) -> list[float]:
        """NaN where nothing is recent, as Prometheus clients write it."""
        self._forget()
        values = sorted(value for _, value in self._recent)
        if not values:
            return [float("nan")] * len(wanted)
        return [float(values[max(0, ceil(quantile * len(values)) - 1)]) for quantile in wanted]

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_SECONDS
        for _ in range(bisect_left(self._recent, (oldest, -1))):
            self._recent.popleft()


class Summaries:
    """Of one model; the names are those of Triton's metrics."""

    def __init__(self) -> None:
        self.requests, self.queue = Summary(), Summary()
        self.compute_input, self.compute_infer, self.compute_output = (
            Summary(),
            Summary(),
            Summary(),
        )
        self.cache_hit, self.cache_miss = Summary(), Summary()

    def request(self, total_ns: int | None, queue_ns: int) -> None:
        """Triton leaves the whole duration of a model out that has a response cache."""
        if total_ns is not None:
            self.requests.observe(total_ns // 1000)
        self.queue.observe(queue_ns // 1000)

    def compute(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.compute_input.observe(input_ns // 1000)
        self.compute_infer.observe(infer_ns // 1000)
        self.compute_output.observe(output_ns // 1000)
