"""Histograms of what a client feels: the wait for the first token, between tokens, and for the
whole answer.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.server.kserve.inference import RequestTrail

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
BETWEEN_TOKENS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE_ANSWER_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
TOKEN_COUNT_BOUNDS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # upstream's
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2000.0, 5000.0)  # upstream's, in milliseconds


class Histogram:
    """Counts by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class TokenLatencies:
    """One model's histograms. Those of tokens fill only where the model counts tokens."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_BOUNDS)
        self.whole_answer_s = Histogram(WHOLE_ANSWER_BOUNDS)
        self.input_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.output_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.first_response_ms = Histogram(FIRST_RESPONSE_BOUNDS)

    def arrive(self, trail: RequestTrail, count: int) -> None:
        """`count` new tokens of one request are here."""
        now = time.monotonic_ns()
        if not trail.last_token_ns:
            trail.first_token_ns = now
            self.first_token_s.observe((now - trail.began_ns) / 1e9)
        if (later := count if trail.last_token_ns else count - 1) > 0:
            # tokens that come together came at the same time
            since = now - (trail.last_token_ns or now)
            self.between_tokens_s.observe(since / 1e9 / later, later)
        trail.last_token_ns = now
        trail.output_tokens += count

    def finish(self, trail: RequestTrail, seconds: float) -> None:
        """A request that succeeded has ended."""
        if not (generated := trail.generated):
            return
        self.whole_answer_s.observe(seconds)
        for part in generated:
            self.input_tokens.observe(part.prompt_tokens)
            self.output_tokens.observe(part.output_tokens)
