"""The increments of a model's counters since the last time, as plain data.

A secondary front end takes the increments of its counters and sends them to the primary one, which
adds them to its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.server.metrics.statistics import (
    PHASES,
    Duration,
    Histogram,
    ModelCounters,
    Phases,
    TokenLatencies,
)
from slipstream.server.metrics.summaries import Summary, SummaryIncrement

_DURATIONS = ("success", "fail", "cache_hit", "cache_miss", "queue")
_TOTALS = ("inferences", "executions")


@dataclass
class Increments:
    """The increments of one version of one model."""

    name: str
    version: str
    pending: int  # requests that the model has not begun to answer: all of them, no increment
    last_inference_ms: int  # since 1970
    totals: list[int]  # in the order of `_TOTALS`
    durations: list[tuple[int, int]]  # count and nanoseconds, in the order of `_DURATIONS`
    phases: list[int]  # count and nanoseconds of each phase
    batches: dict[int, list[int]]  # the same by batch size
    failures: dict[str, int]  # by reason
    # counts and sum of each histogram, by name
    histograms: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    summaries: dict[str, SummaryIncrement] = field(default_factory=dict)  # by name


def take_increments(counters: ModelCounters, name: str, version: str) -> Increments:
    """Return the counts since the last call, and set the counters to zero."""
    taken = Increments(
        name,
        version,
        counters.pending,
        counters.last_inference_ms,
        [getattr(counters, total) for total in _TOTALS],
        [_take_duration(getattr(counters, duration)) for duration in _DURATIONS],
        _take_phases(counters.phases),
        {size: _take_phases(phases) for size, phases in counters.batches.items()},
        dict(counters.failures),
        _take_histograms(counters.tokens),
    )
    for total in _TOTALS:
        setattr(counters, total, 0)
    counters.batches.clear()
    counters.failures.update(dict.fromkeys(counters.failures, 0))
    if counters.summaries is not None:
        taken.summaries = {
            kind: summary.take() for kind, summary in vars(counters.summaries).items()
        }
    return taken


def add_increments(counters: ModelCounters, more: Increments) -> None:
    """Add what another process has counted, apart from `pending`."""
    counters.last_inference_ms = max(counters.last_inference_ms, more.last_inference_ms)
    for total, count in zip(_TOTALS, more.totals, strict=True):
        setattr(counters, total, getattr(counters, total) + count)
    for name, (count, ns) in zip(_DURATIONS, more.durations, strict=True):
        duration: Duration = getattr(counters, name)
        duration.count += count
        duration.ns += ns
    _add_phases(counters.phases, more.phases)
    for size, numbers in more.batches.items():
        _add_phases(counters.batches.setdefault(size, Phases()), numbers)
    for reason, count in more.failures.items():
        counters.failures[reason] += count
    for name, (counts, total_sum) in more.histograms.items():
        _add_to_histogram(getattr(counters.tokens, name), counts, total_sum)
    if counters.summaries is not None:
        for name, increment in more.summaries.items():
            summary: Summary = getattr(counters.summaries, name)
            summary.add(increment)


def _take_duration(duration: Duration) -> tuple[int, int]:
    taken = duration.count, duration.ns
    duration.count = 0
    duration.ns = 0
    return taken


def _take_phases(phases: Phases) -> list[int]:
    taken = [getattr(phases, name) for name in ("count", *PHASES)]
    for name in ("count", *PHASES):
        setattr(phases, name, 0)
    return taken


def _add_phases(phases: Phases, numbers: list[int]) -> None:
    for name, number in zip(("count", *PHASES), numbers, strict=True):
        setattr(phases, name, getattr(phases, name) + number)


def _take_histograms(latencies: TokenLatencies) -> dict[str, tuple[list[int], float]]:
    """Return the histograms that have observations, and empty them."""
    taken: dict[str, tuple[list[int], float]] = {}
    for name, histogram in vars(latencies).items():
        if histogram.count:
            taken[name] = histogram.counts, histogram.sum
            histogram.counts = [0] * len(histogram.counts)
            histogram.sum = 0.0
    return taken


def _add_to_histogram(histogram: Histogram, counts: list[int], total: float) -> None:
    histogram.counts = [own + more for own, more in zip(histogram.counts, counts, strict=True)]
    histogram.sum += total
