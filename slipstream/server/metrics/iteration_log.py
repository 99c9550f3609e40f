"""The verbose log line of an engine iteration: TensorRT-LLM's JSON object.

It is written when the statistics of an iteration arrive. The `nv_trt_llm_*` metrics show the same
numbers until the next ones arrive, and upstream's tests compare both.
"""

from __future__ import annotations

import json
import logging
import time

from slipstream.engine.messages import EngineInfo, EngineStats
from slipstream.server.engine_link.engine import Engine
from slipstream.server.log.output import HANDLER
from slipstream.server.metrics.engine_metrics import read_gauges

logger = logging.getLogger(__name__)

_TIMESTAMP = "timestamp"
# Label and category of a metric: its key in the log. In upstream's order.
_KEYS = {
    ("request_type", "active"): "Active Request Count",
    ("general_type", "iteration_counter"): "Iteration Counter",
    ("request_type", "max"): "Max Request Count",
    ("memory_type", "cpu"): "Runtime CPU Memory Usage",
    ("memory_type", "gpu"): "Runtime GPU Memory Usage",
    ("memory_type", "pinned"): "Runtime Pinned Memory Usage",
    ("general_type", _TIMESTAMP): "Timestamp",
    ("request_type", "context"): "Context Requests",
    ("inflight_batcher_specific_metric", "generation_requests"): "Generation Requests",
    ("inflight_batcher_specific_metric", "micro_batch_id"): "MicroBatch ID",
    ("inflight_batcher_specific_metric", "paused_requests"): "Paused Requests",
    ("request_type", "scheduled"): "Scheduled Requests",
    ("inflight_batcher_specific_metric", "total_context_tokens"): "Total Context Tokens",
    ("v1_specific_metric", "total_context_tokens"): "Total Context Tokens",
    ("v1_specific_metric", "total_generation_tokens"): "Total Generation Tokens",
    ("v1_specific_metric", "empty_generation_slots"): "Empty Generation Slots",
    ("request_type", "waiting"): "Waiting Requests",
    ("kv_cache_block_type", "free"): "Free KV cache blocks",
    ("kv_cache_block_type", "max"): "Max KV cache blocks",
    ("kv_cache_block_type", "tokens_per"): "Tokens per KV cache block",
    ("kv_cache_block_type", "used"): "Used KV cache blocks",
    ("kv_cache_block_type", "reused"): "Reused KV cache blocks",
    ("kv_cache_block_type", "fraction"): "Fraction used KV cache blocks",
    ("disaggregated_serving_type", "kv_cache_transfer_ms"): "KV cache transfer time",
    ("disaggregated_serving_type", "request_count"): "Request count",
}


def log_iteration(model: str, engine: Engine, v1_batching: bool) -> None:
    """Log the latest statistics of an engine if verbose lines are enabled."""
    if HANDLER.settings.verbose_level and engine.info is not None:
        line = iteration_line(engine.info, engine.stats, v1_batching)
        logger.debug("%s", line, extra={"model": model})


def iteration_line(info: EngineInfo, stats: EngineStats, v1_batching: bool) -> str:
    """Return the JSON object of an iteration."""
    gauges = read_gauges(info, stats, v1_batching)
    found: dict[str, float | str] = {
        key: gauges[name] for name, key in _KEYS.items() if name in gauges
    }
    found["Timestamp"] = _local_time(stats.timestamp_us)
    return json.dumps(found, separators=(",", ":"))


def _local_time(time_us: int) -> str:
    seconds, microseconds = divmod(time_us, 1_000_000)
    written = time.strftime("%m-%d-%Y %H:%M:%S", time.localtime(seconds))
    return f"{written}.{microseconds:06d}"
