"""Metrics that exist only when switched on: those of the response cache, and latency summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.statistics import ModelCounters
from slipstream.server.metrics.summaries import DEFAULT_QUANTILES, Summaries, Summary

Models = Mapping[tuple[str, str], ModelCounters]  # by name and version


@dataclass(frozen=True)
class MetricsConfig:
    """The settings of `--metrics-config`."""

    summary_latencies: bool = False
    counter_latencies: bool = True
    histogram_latencies: bool = True
    summary_quantiles: tuple[float, ...] = DEFAULT_QUANTILES


_CACHE: tuple[tuple[str, str, Callable[[ModelCounters], int]], ...] = (
    (
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda counters: counters.cache_hit.count,
    ),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda counters: counters.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda counters: counters.cache_miss.count,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda counters: counters.cache_miss.ns // 1000,
    ),
)
# Name, help, models that have it (True: with a response cache, False: without, None: all), summary.
_SUMMARIES: tuple[tuple[str, str, bool | None, Callable[[Summaries], Summary]], ...] = (
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        False,
        lambda summaries: summaries.requests,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        None,
        lambda summaries: summaries.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        None,
        lambda summaries: summaries.compute_input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        None,
        lambda summaries: summaries.compute_infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds "
        "(does not include cached requests)",
        None,
        lambda summaries: summaries.compute_output,
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
        True,
        lambda summaries: summaries.cache_hit,
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        True,
        lambda summaries: summaries.cache_miss,
    ),
)


def cache_families(models: Models) -> Iterator[Family]:
    """Return the cache metrics of the models that use the response cache."""
    cached = {key: counters for key, counters in models.items() if counters.cached}
    if cached:
        for name, text, value in _CACHE:
            samples = [(labels(key), value(counters)) for key, counters in cached.items()]
            yield Family(name, "counter", text, samples)


def summary_families(models: Models, config: MetricsConfig) -> Iterator[Family]:
    for name, text, with_cache, read in _SUMMARIES:
        found = [
            (labels(key), read(counters.summaries))
            for key, counters in models.items()
            if counters.summaries is not None and with_cache in (None, counters.cached)
        ]
        if found:
            yield Family(name, "summary", text, summaries=found, quantiles=config.summary_quantiles)


def labels(key: tuple[str, str]) -> dict[str, str]:
    return {"model": key[0], "version": key[1]}
