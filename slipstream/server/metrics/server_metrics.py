"""All metrics of a server, with Triton's names and labels and our own `slipstream_*`.

Each scrape reads the counters of the models (`statistics.py`), the latest `EngineStats` of the
engines, and the machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from slipstream.server.engine_link.engine import Engine
from slipstream.server.metrics.engine_metrics import engine_families
from slipstream.server.metrics.increments import Increments, add_increments, take_increments
from slipstream.server.metrics.iteration_log import log_iteration
from slipstream.server.metrics.machine import Machine
from slipstream.server.metrics.optional_metrics import (
    MetricsConfig,
    cache_families,
    labels,
    summary_families,
)
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.statistics import (
    CountedModel,
    CounterTable,
    Histogram,
    ModelCounters,
)
from slipstream.server.metrics.step_timeline import describe_steps
from slipstream.server.metrics.summaries import Summaries

__all__ = ["CountedModel", "ModelCounters", "ServerMetrics"]

_COUNTERS: tuple[tuple[str, str, Callable[[ModelCounters], int]], ...] = (
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda counters: counters.inferences,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda counters: counters.executions,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda counters: counters.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda counters: counters.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda counters: counters.phases.compute_input // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda counters: counters.phases.compute_infer // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds "
        "(does not include cached requests)",
        lambda counters: counters.phases.compute_output // 1000,
    ),
)
# Name, help, labels besides model and version, and the histogram of a model.
_HISTOGRAMS: tuple[tuple[str, str, dict[str, str], Callable[[ModelCounters], Histogram]], ...] = (
    (
        "nv_inference_first_response_histogram_ms",
        "Duration from request to first response in milliseconds",
        {},
        lambda counters: counters.tokens.first_response_ms,
    ),
    (
        "nv_llm_input_token_len",
        "TRT LLM response metrics",
        {"response_metric_type": "total_input_tokens"},
        lambda counters: counters.tokens.input_tokens,
    ),
    (
        "nv_llm_output_token_len",
        "TRT LLM response metrics",
        {"response_metric_type": "total_output_tokens"},
        lambda counters: counters.tokens.output_tokens,
    ),
    (
        "slipstream_time_to_first_token_seconds",
        "From the arrival of a request to its first token",
        {},
        lambda counters: counters.tokens.first_token_s,
    ),
    (
        "slipstream_inter_token_latency_seconds",
        "Between two tokens of a request",
        {},
        lambda counters: counters.tokens.between_tokens_s,
    ),
    (
        "slipstream_request_seconds",
        "From the arrival of a successful request to the end of its response",
        {},
        lambda counters: counters.tokens.request_s,
    ),
)


class Entry(Protocol):
    """A `ModelVersion` of the registry."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def model(self) -> Any: ...


class SpanCounters(Protocol):
    """The exporter of trace spans."""

    @property
    def exported(self) -> int: ...
    @property
    def dropped(self) -> int: ...


class ServerMetrics:
    def __init__(
        self, machine: Machine | None = None, config: MetricsConfig = MetricsConfig()
    ) -> None:
        self._config = config
        self._models = CounterTable()
        self._engines: dict[tuple[str, str], Engine] = {}
        self._engine_of: dict[tuple[str, str], str] = {}  # model and version → its engine's model
        self._v1_batching_models: set[str] = set()  # models that ask for TensorRT-LLM's V1 batching
        self._machine = machine or Machine()
        self._sources: list[Callable[[], Iterable[Family]]] = []
        # front end → model and version → requests that the model has not begun to answer
        self._pending: dict[int, dict[tuple[str, str], int]] = {}
        self._pending_taken: dict[tuple[str, str], int] = {}  # what `take_increments` reported
        # waits until the increments of all other front ends are added
        self.collect: Callable[[], Awaitable[None]] = _no_others

    def model(self, name: str, version: str = "1") -> ModelCounters:
        if (name, version) not in self._models:
            summaries = Summaries() if self._config.summary_latencies else None
            self._models[name, version] = ModelCounters(summaries=summaries)
        return self._models[name, version]

    def count(self, entry: Entry) -> CountedModel:
        """Return the model with counters around it.

        Its requests also count for the models whose work it does.
        """
        composing_models = {
            phase: partial(self._models.find_latest, name)
            for phase, name in entry.model.composing_models.items()
        }
        counters = self.model(entry.name, entry.version)
        counters.cached = entry.model.cached
        engine = entry.model.composing_models.get("compute_infer", "")
        self._engine_of[entry.name, entry.version] = engine
        if entry.model.config.parameter("gpt_model_type") in ("V1", "v1"):
            self._v1_batching_models.add(entry.name)
        return CountedModel(entry.model, counters, composing_models)

    def watch_engine(self, name: str, engine: Engine, version: str = "1") -> None:
        """Add the metrics of an engine. `name`: its model in the repository."""
        self._engines[name, version] = engine
        engine.on_stats = lambda: log_iteration(name, engine, name in self._v1_batching_models)

    def forget(self, name: str) -> None:
        """Remove the metrics of an unloaded model. Like Triton's, they restart at zero.

        Those of its engine keep what they counted for it.
        """
        for key in [key for key in self._models if key[0] == name]:
            counters = self._models.pop(key)
            for pending in self._pending.values():
                pending.pop(key, None)
            engine = self._models.find_latest(self._engine_of.pop(key, ""))
            engine.counters.tokens.absorb(counters.tokens)
        self._engines = {key: found for key, found in self._engines.items() if key[0] != name}
        self._v1_batching_models.discard(name)

    def take_increments(self) -> list[Increments]:
        """Return what all models have counted since the last call, and set it to zero."""
        former = self._pending_taken
        self._pending_taken = {key: found.pending for key, found in self._models.items()}
        return [
            take_increments(counters, *key)
            for key, counters in self._models.items()
            if _has_counted(counters) or counters.pending != former.get(key, 0)
        ]

    def add_increments(self, frontend: int, increments: Sequence[Increments]) -> None:
        """Add what another front end has counted. Counts of models that were unloaded are lost."""
        known = self._pending.setdefault(frontend, {})
        for more in increments:
            key = more.name, more.version
            if (counters := self._models.get(key)) is not None:
                add_increments(counters, more)
                counters.pending += more.pending - known.get(key, 0)
                known[key] = more.pending

    def drop_frontend(self, frontend: int) -> None:
        """Remove the pending requests of a front end that has ended."""
        for key, pending in self._pending.pop(frontend, {}).items():
            if key in self._models:
                self._models[key].pending -= pending

    def describe_steps(self, started_us: int) -> dict[str, Any]:
        """Return the last steps of the engines that started after `started_us`, as JSON."""
        return describe_steps(self._engines, started_us)

    def watch_span_export(self, counters: SpanCounters) -> None:
        self.add_source(lambda: _span_families(counters))

    def add_source(self, source: Callable[[], Iterable[Family]]) -> None:
        """Add families that `source` returns at every scrape."""
        self._sources.append(source)

    def render(self) -> str:
        families = [
            *self._model_families(),
            *engine_families(self._engines, self._v1_batching_models),
        ]
        families += self._machine.families()
        families += [family for source in self._sources for family in source()]
        return "".join(family.render() for family in families)

    def _model_families(self) -> Iterator[Family]:
        def family(
            name: str, kind: str, text: str, value: Callable[[ModelCounters], int]
        ) -> Family:
            return Family(
                name,
                kind,
                text,
                [(labels(key), value(found)) for key, found in self._models.items()],
            )

        success = "Number of successful inference requests, all batch sizes"
        yield family(
            "nv_inference_request_success",
            "counter",
            success,
            lambda counters: counters.success.count,
        )
        yield Family(
            "nv_inference_request_failure",
            "counter",
            "Number of failed inference requests, all batch sizes",
            [
                (labels(key) | {"reason": reason}, count)
                for key, counters in self._models.items()
                for reason, count in counters.failures.items()
            ],
        )
        for name, text, value in _COUNTERS:
            if name.endswith("_us") and not self._config.counter_latencies:
                continue
            yield family(name, "counter", text, value)
        pending = "Instantaneous number of pending requests awaiting execution per-model."
        yield family(
            "nv_inference_pending_request_count",
            "gauge",
            pending,
            lambda counters: counters.pending,
        )
        yield from cache_families(self._models)
        yield from summary_families(self._models, self._config)
        yield from self._histogram_families()
        yield from self._info_families()

    def _histogram_families(self) -> Iterator[Family]:
        """Return the histograms that have observations in some model."""
        for name, text, label, read in _HISTOGRAMS:
            if name.startswith("nv_inference_") and not self._config.histogram_latencies:
                continue
            filled = [
                (labels(key) | label, histogram)
                for key, histogram in self._with_engines(read).items()
                if histogram.count
            ]
            if filled:
                yield Family(name, "histogram", text, histograms=filled)

    def _with_engines(
        self, read: Callable[[ModelCounters], Histogram]
    ) -> dict[tuple[str, str], Histogram]:
        """Return the histogram of each model. An engine's has the requests of all its models."""
        found = {key: read(counters) for key, counters in self._models.items()}
        for key, engine in self._engine_of.items():
            latest = engine, self._models.find_latest(engine).version
            if latest in found and key in found:
                found[latest] = found[latest].plus(read(self._models[key]))
        return found

    def _info_families(self) -> Iterator[Family]:
        """Return which engine each model uses, to find the series of its engine."""
        engines = {key: self._engine_of.get(key, "") for key in self._models}
        engines |= {key: key[0] for key in self._engines if key in engines}
        samples = [(labels(key) | {"engine": name}, 1) for key, name in engines.items() if name]
        if samples:
            text = "Always 1. The engine model that a model generates with"
            yield Family("slipstream_model_info", "gauge", text, samples)


async def _no_others() -> None:
    """Return at once: there is only one front end."""


def _has_counted(counters: ModelCounters) -> bool:
    """Return whether a model has answered a request or a part of it."""
    latencies = vars(counters.tokens).values()
    answered = counters.success.count + counters.fail.count
    return bool(answered) or any(histogram.count for histogram in latencies)


def _span_families(counters: SpanCounters) -> Iterator[Family]:
    yield Family(
        "slipstream_trace_spans_exported_total",
        "counter",
        "Number of trace spans that the collector took",
        [({}, counters.exported)],
    )
    yield Family(
        "slipstream_trace_spans_dropped_total",
        "counter",
        "Number of trace spans that were given up",
        [({}, counters.dropped)],
    )
