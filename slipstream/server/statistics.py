"""What happened to the requests of each model: the one set of counters behind the statistics and the metrics.

`CountedModel` stands around a model and fills them. The counting is Triton's: a success counts requests,
`inferences` counts the batch items of successes, `executions` every run of the model, also one that failed
(an ensemble runs nothing itself, so its failures are no executions).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.repository.config import ModelConfig
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferRequest, InferResponse, RequestTrail, ServedModel
from slipstream.server.latencies import TokenLatencies
from slipstream.server.summaries import Summaries
from slipstream.server.tracing import RequestTrace

if TYPE_CHECKING:
    from slipstream.server.registry import ModelRegistry

FAILURE_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
PHASES = ("compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def document(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True, slots=True)
class _Spent:
    """Where the time of one request went, in nanoseconds."""

    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @staticmethod
    def between(began: int, ended: int, trail: RequestTrail) -> _Spent:
        """A phase that the model said nothing of took no time; what is left over is computing."""
        queue_end = trail.queue_ended_ns or began
        input_end = max(trail.input_ended_ns, queue_end)
        infer_end = trail.infer_ended_ns or ended
        return _Spent(queue_end - began, input_end - queue_end, max(infer_end - input_end, 0), ended - infer_end)


def _phases() -> dict[str, Duration]:
    return {phase: Duration() for phase in PHASES}


@dataclass
class ModelCounters:
    """One version of one model."""

    ensemble: bool = False
    decoupled: bool = False
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cached: bool = False  # served from the response cache where it can be
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    summaries: Summaries | None = None  # where somebody asked for them
    queue: Duration = field(default_factory=Duration)
    phases: dict[str, Duration] = field(default_factory=_phases)
    batches: dict[int, dict[str, Duration]] = field(default_factory=dict)  # by batch size
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    inferences: int = 0
    executions: int = 0
    last_inference_ms: int = 0  # since 1970
    pending: int = 0  # came in, and the model has not begun to answer
    tokens: TokenLatencies = field(default_factory=TokenLatencies)

    async def record(
        self,
        request: InferRequest,
        responses: AsyncGenerator[InferResponse, None],
        batch_size: int = 1,
        parts: Parts | None = None,
    ) -> AsyncGenerator[InferResponse, None]:
        """Pass on the answers to one request and count how it went."""
        counted = _Counted(self, request, batch_size, parts or {})
        try:
            async with aclosing(responses):
                async for response in responses:
                    counted.answer(response)
                    yield response
            counted.complete = True
        except Exception as error:
            counted.failure = failure_reason(error)
            raise
        finally:
            counted.end()

    def succeed(self, spent: _Spent, batch_size: int) -> None:
        self._answered(spent)
        for phase, duration in self.phases.items():
            duration.add(getattr(spent, phase))
        if self.summaries is not None:
            self.summaries.compute(spent.compute_input, spent.compute_infer, spent.compute_output)
        self.inferences += batch_size
        self._execute(spent, batch_size)

    def _answered(self, spent: _Spent) -> None:
        total = spent.queue + spent.compute_input + spent.compute_infer + spent.compute_output
        self.success.add(total)
        self.queue.add(spent.queue)
        self.last_inference_ms = time.time_ns() // 1_000_000
        if self.summaries is not None:
            self.summaries.request(None if self.cached else total, spent.queue)

    def succeed_from_cache(self, spent: _Spent, ns: int) -> None:
        """The model did nothing for it, so it is neither an inference nor an execution."""
        self._answered(spent)
        self.cache_hit.add(ns)
        if self.summaries is not None:
            self.summaries.cache_hit.observe(ns // 1000)

    def miss_cache(self, ns: int) -> None:
        self.cache_miss.add(ns)
        if self.summaries is not None:
            self.summaries.cache_miss.observe(ns // 1000)

    def failed(self, reason: str, spent: _Spent, batch_size: int) -> None:
        if self.ensemble and reason == "BACKEND":
            reason = "OTHER"  # an ensemble has no backend that could fail
        self.failures[reason] += 1
        self.fail.add(spent.queue + spent.compute_input + spent.compute_infer + spent.compute_output)
        if not self.ensemble and reason != "REJECTED":
            self._execute(spent, batch_size)

    def _execute(self, spent: _Spent, batch_size: int) -> None:
        self.executions += 1
        if batch_size not in self.batches:
            self.batches[batch_size] = _phases()
        for phase, duration in self.batches[batch_size].items():
            duration.add(getattr(spent, phase))

    def document(self, name: str, version: str) -> dict[str, Any]:
        """Triton's JSON for one version of a model, in its order."""
        durations = {"success": self.success, "fail": self.fail, "queue": self.queue, **self.phases}
        durations |= {"cache_hit": self.cache_hit, "cache_miss": self.cache_miss}
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": _documents(durations),
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **_documents(phases)} for size, phases in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


def _documents(durations: dict[str, Duration]) -> dict[str, dict[str, int]]:
    return {name: duration.document() for name, duration in durations.items()}


Parts = Mapping[str, Callable[[], ModelCounters]]


class _Counted:
    """One request while it is answered."""

    def __init__(self, counters: ModelCounters, request: InferRequest, batch_size: int, parts: Parts) -> None:
        self._counters = counters
        self._parts = parts
        self._trail = request.trail
        self._batch_size = batch_size
        self._began = time.monotonic_ns()
        self._waiting = True
        if self._trail.trace is not None:
            self._begin_trace(self._trail.trace, request)
        self.failure: str | None = None
        self.complete = False  # otherwise the reader has left
        counters.pending += 1
        self._trail.attend(self._begin_answering, counters.tokens, self._began)

    def _begin_answering(self) -> None:
        self._counters.pending -= self._waiting
        self._waiting = False

    def _begin_trace(self, trace: RequestTrace, request: InferRequest) -> None:
        trace.model(request.model_name, request.model_version, request.id)
        trace.stamp("REQUEST_START", self._began)
        trace.stamp("QUEUE_START", self._began)
        trace.tensors("TENSOR_QUEUE_INPUT", request.inputs.values())

    def _end_trace(self, trace: RequestTrace, spent: _Spent, ended: int) -> None:
        if self._parts or not self._counters.ensemble:  # an ensemble of others computes nothing itself
            computing = self._began + spent.queue
            trace.stamp("COMPUTE_START", computing)
            trace.stamp("COMPUTE_INPUT_END", computing + spent.compute_input)
            trace.stamp("COMPUTE_OUTPUT_START", ended - spent.compute_output)
            trace.stamp("COMPUTE_END", ended)
        trace.stamp("REQUEST_END", ended)

    def answer(self, response: InferResponse) -> None:
        if self._trail.trace is not None:
            self._trail.trace.tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
            self._trail.trace.stamp("INFER_RESPONSE_COMPLETE")
        # Nothing can follow these, so a reader that stops here has all of it.
        self.complete = self.complete or response.final or not self._counters.decoupled
        if response.error is not None:
            self.failure = failure_reason(response.error)
        elif not self._trail.first_answer_ns:
            self._begin_answering()
            self._trail.first_answer_ns = time.monotonic_ns()
            if self._counters.decoupled:
                waited = (self._trail.first_answer_ns - self._began) / 1e6
                self._counters.tokens.first_response_ms.observe(waited)

    def end(self) -> None:
        self._begin_answering()
        ended = time.monotonic_ns()
        spent = _Spent.between(self._began, ended, self._trail)
        succeeded = self.complete and self.failure is None
        if self._trail.cache_miss_ns:
            self._counters.miss_cache(self._trail.cache_miss_ns)
        if succeeded and self._trail.cache_hit_ns:
            self._counters.succeed_from_cache(spent, self._trail.cache_hit_ns)
        elif succeeded:
            self._counters.succeed(spent, self._batch_size)
        else:
            self._counters.failed(self.failure or "CANCELED", spent, self._batch_size)
        self._counters.tokens.finish(self._trail, (ended - self._began) / 1e9, succeeded)
        self._end_parts(spent, succeeded)
        if self._trail.trace is not None:
            self._end_trace(self._trail.trace, spent, ended)

    def _end_parts(self, spent: _Spent, succeeded: bool) -> None:
        for phase, find in self._parts.items():
            share = _Spent(0, 0, getattr(spent, phase), 0)
            if succeeded:
                find().succeed(share, self._batch_size)
            elif phase == "compute_infer" and self._trail.input_ended_ns:
                find().failed(self.failure or "CANCELED", share, self._batch_size)


def failure_reason(error: Exception) -> str:
    """Which of Triton's four reasons for a failure this one is."""
    if not isinstance(error, InferenceError):
        return "OTHER"
    return {Code.UNAVAILABLE: "REJECTED", Code.CANCELLED: "CANCELED"}.get(error.code, "BACKEND")


class CountedModel:
    """A model whose requests are counted.

    `parts`: the models whose work this one does in their place, by the phase that each of them is.
    """

    def __init__(self, model: ServedModel, counters: ModelCounters, parts: Parts | None = None) -> None:
        self.inner = model
        self.counters = counters
        self._parts = parts
        counters.ensemble = bool(model.config.ensemble_steps)

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    @property
    def decoupled(self) -> bool:
        return self.inner.decoupled

    @property
    def ready(self) -> bool:
        return self.inner.ready

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self.counters.decoupled = self.inner.decoupled  # of an ensemble, its steps tell, which may come and go
        items = batch_size(request, self.config)
        return self.counters.record(request, self.inner.infer(request), items, self._parts)


def batch_size(request: InferRequest, config: ModelConfig) -> int:
    shapes = [tensor.shape for tensor in request.inputs.values() if tensor.shape]
    return shapes[0][0] if config.max_batch_size > 0 and shapes else 1


def model_statistics(registry: ModelRegistry, name: str = "", version: str = "") -> list[dict[str, Any]]:
    """The `model_stats` of one model, or of all when none is named. Raises InferenceError for an unknown one."""
    found = [entry for entry in registry if not name or entry.name == name]
    if name and not found:
        raise InferenceError(f"requested model '{name}' is not available")
    if version:
        found = [entry for entry in found if entry.version == version]
        if not found:
            raise InferenceError(f"requested model version is not available for model '{name}'")
    return [_counters_of(entry.model).document(entry.name, entry.version) for entry in found]


def _counters_of(model: ServedModel) -> ModelCounters:
    return model.counters if isinstance(model, CountedModel) else ModelCounters()
