"""Metrics of the engine: TensorRT-LLM's `nv_trt_llm_*` gauges and our own `slipstream_*`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from slipstream.engine.messages import QUEUE_SECONDS_BOUNDS, EngineInfo, EngineStats
from slipstream.server.engine_link.client import EngineClient
from slipstream.server.engine_link.engine import Engine
from slipstream.server.engine_link.replicas import Replicas
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.statistics import Histogram

# by the name and version of the engine's model in the repository
Engines = Mapping[tuple[str, str], Engine]


def engine_families(engines: Engines, v1_batching_models: Collection[str] = ()) -> Iterator[Family]:
    """Return the metrics of all loaded engines.

    `v1_batching_models`: names of the models that ask for TensorRT-LLM's V1 batching. They have its
    metrics instead of those of in-flight batching.
    """
    loaded = {
        key: (engine.info, engine.stats)
        for key, engine in engines.items()
        if engine.info is not None
    }
    if not loaded:
        return
    gauges = {
        key: read_gauges(info, stats, key[0] in v1_batching_models)
        for key, (info, stats) in loaded.items()
    }
    for name, text, label, _ in _UPSTREAM:
        samples = [
            (_labels(key) | {label: category}, value)
            for key, found in gauges.items()
            for (of, category), value in found.items()
            if of == label
        ]
        if samples:
            yield Family(name, "gauge", text, samples)
    load = [(_labels(key), info.load_seconds) for key, (info, _) in loaded.items()]
    yield Family("nv_model_load_duration_secs", "gauge", "Model load time in seconds", load)
    for name, kind, text, value in _OWN:
        yield Family(
            name, kind, text, [(_labels(key), value(stats)) for key, (_, stats) in loaded.items()]
        )
    if any(stats.adapter_loads for _, stats in loaded.values()):
        for name, kind, text, value in _ADAPTERS:
            yield Family(
                name,
                kind,
                text,
                [(_labels(key), value(stats)) for key, (_, stats) in loaded.items()],
            )
    queue = [(_labels(key), _queue_histogram(stats)) for key, (_, stats) in loaded.items()]
    yield Family(
        "slipstream_queue_seconds",
        "histogram",
        "From the arrival of a request in the engine to its first step",
        histograms=queue,
    )
    yield from _replica_families(engines)


def _replica_families(engines: Engines) -> Iterator[Family]:
    """Return what differs between the replicas of engines that have several."""
    replicas = [
        (_labels(key) | {"replica": str(index)}, client)
        for key, engine in engines.items()
        if isinstance(engine, Replicas) and engine.info is not None
        for index, client in enumerate(engine.clients)
    ]
    if not replicas:
        return
    for name, kind, text, value in _REPLICAS:
        yield Family(name, kind, text, [(labels, value(client)) for labels, client in replicas])


def read_gauges(
    info: EngineInfo, stats: EngineStats, v1_batching: bool
) -> dict[tuple[str, str], float]:
    """Return the values of TensorRT-LLM's gauges, by label and category."""
    left_out = _INFLIGHT if v1_batching else _V1
    return {
        (label, category): value
        for name, _, label, read in _UPSTREAM
        if name != left_out
        for category, value in read(info, stats).items()
    }


def _labels(key: tuple[str, str]) -> dict[str, str]:
    return {"model": key[0], "version": key[1]}


def _queue_histogram(stats: EngineStats) -> Histogram:
    histogram = Histogram(QUEUE_SECONDS_BOUNDS)
    histogram.counts = stats.queue_counts
    histogram.sum = stats.queue_seconds
    return histogram


def _request_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {
        "active": stats.running + stats.waiting,
        "max": info.max_rows,
        "scheduled": stats.running,
        "context": stats.context_requests,
        "waiting": stats.waiting,
    }


def _memory_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    taken = info.weight_bytes + info.compressed_weight_bytes + info.cache_bytes
    on_cpu = info.device.startswith("cpu")
    return {"cpu": taken if on_cpu else 0, "gpu": 0 if on_cpu else taken, "pinned": 0}


def _block_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    used = stats.total_blocks - stats.free_blocks
    return {
        "max": stats.total_blocks,
        "free": stats.free_blocks,
        "used": used,
        "tokens_per": info.block_tokens,
        "reused": stats.reused_blocks,
        "fraction": used / stats.total_blocks if stats.total_blocks else 0.0,
    }


def _batcher_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {
        "total_context_tokens": stats.context_tokens,
        "generation_requests": stats.generation_requests,
        "micro_batch_id": 0,  # there is only one micro batch
        "paused_requests": stats.paused,
    }


def _v1_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {
        "total_context_tokens": stats.context_tokens,
        "total_generation_tokens": stats.generation_requests,  # one token per request
        "empty_generation_slots": 0,  # the next request takes a free slot at once
    }


def _disaggregated_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    # Prefill and decode are not disaggregated.
    return {"kv_cache_transfer_ms": 0, "request_count": 0}


def _general_metrics(info: EngineInfo, stats: EngineStats) -> dict[str, float]:
    return {"timestamp": stats.timestamp_us, "iteration_counter": stats.steps}


_INFLIGHT = "nv_trt_llm_inflight_batcher_metrics"
_V1 = "nv_trt_llm_v1_metrics"
_ReadGauges = Callable[[EngineInfo, EngineStats], dict[str, float]]
_UPSTREAM: tuple[tuple[str, str, str, _ReadGauges], ...] = (
    ("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type", _request_metrics),
    (
        "nv_trt_llm_runtime_memory_metrics",
        "TRT LLM runtime memory metrics",
        "memory_type",
        _memory_metrics,
    ),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        _block_metrics,
    ),
    (
        _INFLIGHT,
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        _batcher_metrics,
    ),
    (_V1, "TRT LLM v1-specific metrics", "v1_specific_metric", _v1_metrics),
    ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", _general_metrics),
    (
        "nv_trt_llm_disaggregated_serving_metrics",
        "TRT LLM disaggregated serving metrics",
        "disaggregated_serving_type",
        _disaggregated_metrics,
    ),
)


def _hit_rate(stats: EngineStats) -> float:
    return stats.cached_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0


_OWN: tuple[tuple[str, str, str, Callable[[EngineStats], float]], ...] = (
    (
        "slipstream_requests_running",
        "gauge",
        "Requests that hold a row of the batch",
        lambda s: s.running,
    ),
    (
        "slipstream_requests_waiting",
        "gauge",
        "Requests that wait for a row or for blocks",
        lambda s: s.waiting,
    ),
    (
        "slipstream_requests_preempted",
        "gauge",
        "Requests that were preempted and wait again",
        lambda s: s.paused,
    ),
    (
        "slipstream_preemptions_total",
        "counter",
        "Number of times a request was preempted by another",
        lambda s: s.preemptions,
    ),
    (
        "slipstream_requests_finished_total",
        "counter",
        "Requests that ended, in any way",
        lambda s: s.finished,
    ),
    (
        "slipstream_requests_cancelled_total",
        "counter",
        "Requests that the client cancelled or left",
        lambda s: s.cancelled,
    ),
    (
        "slipstream_requests_failed_total",
        "counter",
        "Requests that ended with an error",
        lambda s: s.failed,
    ),
    (
        "slipstream_prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that started",
        lambda s: s.prompt_tokens,
    ),
    (
        "slipstream_prompt_tokens_cached_total",
        "counter",
        "Prompt tokens that the cache already had",
        lambda s: s.cached_prompt_tokens,
    ),
    ("slipstream_output_tokens_total", "counter", "Tokens sampled", lambda s: s.output_tokens),
    ("slipstream_steps_total", "counter", "Engine steps", lambda s: s.steps),
    (
        "slipstream_kv_blocks_used",
        "gauge",
        "Blocks of the KV cache that requests hold",
        lambda s: s.total_blocks - s.free_blocks,
    ),
    (
        "slipstream_kv_blocks_free",
        "gauge",
        "Blocks of the KV cache that are free",
        lambda s: s.free_blocks,
    ),
    (
        "slipstream_kv_blocks_cached",
        "gauge",
        "Free blocks whose contents can be reused",
        lambda s: s.cached_blocks,
    ),
    (
        "slipstream_kv_blocks_reused_total",
        "counter",
        "Blocks of a prompt found in the KV cache",
        lambda s: s.reused_blocks,
    ),
    (
        "slipstream_kv_cache_hit_rate",
        "gauge",
        "Share of prompt tokens that the cache already had, since the start",
        _hit_rate,
    ),
)
# metrics of each replica, where an engine has several
_REPLICAS: tuple[tuple[str, str, str, Callable[[EngineClient], float]], ...] = (
    (
        "slipstream_replica_ready",
        "gauge",
        "1 while the replica serves, 0 while it is restarted",
        lambda client: int(client.ready),
    ),
    (
        "slipstream_replica_requests_running",
        "gauge",
        "Requests that hold a row of the replica's batch",
        lambda client: client.stats.running,
    ),
    (
        "slipstream_replica_requests_finished_total",
        "counter",
        "Requests that ended in the replica, in any way",
        lambda client: client.stats.finished,
    ),
    (
        "slipstream_replica_prompt_tokens_total",
        "counter",
        "Prompt tokens of requests that started in the replica",
        lambda client: client.stats.prompt_tokens,
    ),
    (
        "slipstream_replica_prompt_tokens_cached_total",
        "counter",
        "Prompt tokens that the replica's cache already had",
        lambda client: client.stats.cached_prompt_tokens,
    ),
)
# metrics that exist after the first adapter was loaded
_ADAPTERS: tuple[tuple[str, str, str, Callable[[EngineStats], float]], ...] = (
    ("slipstream_adapters", "gauge", "Adapters in the host's memory", lambda s: s.adapters),
    (
        "slipstream_adapter_bytes",
        "gauge",
        "Host memory used by adapters",
        lambda s: s.adapter_bytes,
    ),
    (
        "slipstream_adapter_loads_total",
        "counter",
        "Adapters that were loaded",
        lambda s: s.adapter_loads,
    ),
    (
        "slipstream_adapter_pages_free",
        "gauge",
        "Free pages of the device memory for adapters",
        lambda s: s.free_adapter_pages,
    ),
)
