"""The statistics API: the document of each model's counters, as Triton's HTTP and gRPC show it."""

from __future__ import annotations

from typing import Any

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import ModelRegistry, ServedModel
from slipstream.server.metrics.statistics import (
    PHASES,
    CountedModel,
    Duration,
    ModelCounters,
    Phases,
)


def model_statistics(
    registry: ModelRegistry, name: str = "", version: str = ""
) -> list[dict[str, Any]]:
    """Return the `model_stats` of one model, or of all. InferenceError: the model is unknown."""
    found = [entry for entry in registry if not name or entry.name == name]
    if name and not found:
        raise InferenceError(f"requested model '{name}' is not available")
    if version:
        found = [entry for entry in found if entry.version == version]
        if not found:
            raise InferenceError(f"requested model version is not available for model '{name}'")
    return [
        counters_document(_counters_of(entry.model), entry.name, entry.version) for entry in found
    ]


def _counters_of(model: ServedModel) -> ModelCounters:
    return model.counters if isinstance(model, CountedModel) else ModelCounters()


def counters_document(counters: ModelCounters, name: str, version: str) -> dict[str, Any]:
    """Return Triton's JSON for one version of a model, in its order."""
    return {
        "name": name,
        "version": version,
        "last_inference": counters.last_inference_ms,
        "inference_count": counters.inferences,
        "execution_count": counters.executions,
        "inference_stats": {
            "success": _duration(counters.success),
            "fail": _duration(counters.fail),
            "queue": _duration(counters.queue),
            **_phases(counters.phases),
            "cache_hit": _duration(counters.cache_hit),
            "cache_miss": _duration(counters.cache_miss),
        },
        "response_stats": {},
        "batch_stats": [
            {"batch_size": size, **_phases(phases)}
            for size, phases in sorted(counters.batches.items())
        ],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _phases(phases: Phases) -> dict[str, dict[str, int]]:
    return {phase: {"count": phases.count, "ns": getattr(phases, phase)} for phase in PHASES}
