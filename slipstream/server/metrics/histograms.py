"""Histograms and summaries: distributions of latencies and token counts.

A histogram counts observations by upper bound. A summary gives quantiles of the last minute and
exists only with `--metrics-config summary_latencies=true`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from math import ceil
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.server.kserve.inference import RequestTimes

# upper bounds in seconds
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
# TensorRT-LLM's bounds for token counts, and Triton's for milliseconds
TOKEN_COUNT_BOUNDS = (10.0, 50.0, 100.0, 500.0, 1000.0)
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2000.0, 5000.0)

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
WINDOW_SECONDS = 60.0
MAX_OBSERVATIONS = 4096  # per summary; above it, a random observation makes room for a new one


class Histogram:
    """Counts observations by upper bound. The last count is of those above every bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class TokenLatencies:
    """The histograms of one model. Those of tokens stay empty if the model counts no tokens."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_BOUNDS)
        self.request_s = Histogram(REQUEST_BOUNDS)
        self.input_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.output_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.first_response_ms = Histogram(FIRST_RESPONSE_BOUNDS)

    def arrive(self, times: RequestTimes, count: int) -> None:
        """Record that `count` tokens of a request arrived now."""
        now = time.monotonic_ns()
        last = times.last_token_ns
        later = count
        if not last:
            times.first_token_ns = now
            self.first_token_s.observe((now - times.began_ns) / 1e9)
            later -= 1
        if later > 0:
            # Tokens that arrive together share the time since the last ones.
            since = now - (last or now)
            self.between_tokens_s.observe(since / 1e9 / later, later)
        times.last_token_ns = now
        times.output_tokens += count

    def finish(self, times: RequestTimes, seconds: float) -> None:
        """Record a successful request that took this long."""
        generated = times.generated
        if not generated:
            return
        self.request_s.observe(seconds)
        for part in generated:
            self.input_tokens.observe(part.prompt_tokens)
            self.output_tokens.observe(part.output_tokens)


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
