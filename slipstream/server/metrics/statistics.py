"""Counters and histograms of each model's requests, for the statistics API and the metrics.

`CountedModel` wraps a model and counts as Triton does: `success` counts requests, `inferences` the
batch items of successful requests, and `executions` every run of the model, including failed ones.
An ensemble runs nothing itself, so its failures are no executions.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slipstream.server.kserve.errors import Code, InferenceError, error_type
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    RequestTimes,
    RequestTrace,
    ResponseStream,
    ServedModel,
    WrappedModel,
    batch_size,
)
from slipstream.server.log.formats import set_error_context
from slipstream.server.metrics.summaries import Summaries
from slipstream.server.metrics.trace_stamps import begin_trace, end_trace, trace_steps

FAILURE_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
PHASES = ("compute_input", "compute_infer", "compute_output")

# The stages that end the phases of the steps, in the order in which a request reaches them. The
# last phase, the output of the detokenizer, ends with the request.
_STAGES = (
    "input_ended_ns",
    "encoded_ns",
    "prepared_ns",
    "submitted_ns",
    "produced_ns",
    "received_ns",
    "taken_ns",
    "decoded_ns",
)
# upper bounds in seconds
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
# TensorRT-LLM's bounds for token counts, and Triton's for milliseconds
TOKEN_COUNT_BOUNDS = (10.0, 50.0, 100.0, 500.0, 1000.0)
FIRST_RESPONSE_BOUNDS = (100.0, 500.0, 2000.0, 5000.0)


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

    def plus(self, other: Histogram) -> Histogram:
        """Return a histogram of the observations of both."""
        both = Histogram(self.bounds)
        both.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        both.sum = self.sum + other.sum
        return both


class TokenLatencies:
    """The histograms of one model. Those of tokens stay empty if the model counts no tokens."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_BOUNDS)
        self.request_s = Histogram(REQUEST_BOUNDS)
        self.input_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.output_tokens = Histogram(TOKEN_COUNT_BOUNDS)
        self.first_response_ms = Histogram(FIRST_RESPONSE_BOUNDS)

    def absorb(self, other: TokenLatencies) -> None:
        """Add the observations of another model."""
        for name, histogram in vars(other).items():
            setattr(self, name, getattr(self, name).plus(histogram))

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


class Spent(NamedTuple):
    """The durations of the phases of one request, in nanoseconds.

    An ensemble of built-in models runs as one. The phases of its steps are cut at the times that
    its request reached each stage, without a gap: they add up to those of the ensemble.
    """

    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @staticmethod
    def between(began: int, ended: int, times: RequestTimes) -> Spent:
        """Return the phases of a request. A phase without a time is empty; the rest is computing.

        A request waits in its model's queue before it begins, or in the engine's queue after its
        inputs are ready.
        """
        queue_end = times.queue_ended_ns or began
        input_end = max(_latest(times, "input_ended_ns"), queue_end)
        infer_end = _latest(times, "infer_ended_ns") or ended
        inferring = max(infer_end - input_end, 0)
        waited = min(_engine_queue(times), inferring)
        return Spent(
            queue_end - began + waited, input_end - queue_end, inferring - waited, ended - infer_end
        )

    @staticmethod
    def total_of(steps: Iterable[Spent]) -> Spent:
        """Return what an ensemble spent: the sum of its steps, phase by phase."""
        return Spent(*map(sum, zip(*steps, strict=True)))


def spent_by_steps(began: int, ended: int, times: RequestTimes) -> Mapping[str, Spent]:
    """Return what the steps of a text pipeline spent, by the phase of the request that they are.

    The tokenizer is the request's input, the engine its computation, the detokenizer its output.
    Time after the last stage that was reached counts for the phase which that stage began.
    """
    cuts = [ended]
    for stage in reversed(_STAGES):
        reached = _latest(times, stage) or cuts[-1]
        cuts.append(min(max(reached, began), cuts[-1]))
    lengths = [after - before for before, after in pairwise([began, *reversed(cuts)])]
    waited = min(_engine_queue(times), lengths[4])
    return {
        "compute_input": Spent(0, *lengths[:3]),
        "compute_infer": Spent(waited, lengths[3], lengths[4] - waited, lengths[5]),
        "compute_output": Spent(0, *lengths[6:]),
    }


def _engine_queue(times: RequestTimes) -> int:
    return max(part.engine_queue_ns for part in (times, *times.branches))


def _latest(times: RequestTimes, stage: str) -> int:
    """Return when a request, or the last of its batch items, reached a stage. 0: it did not."""
    reached = 0
    for part in (times, *times.branches):
        reached = max(reached, getattr(part, stage, 0), getattr(part.stages, stage, 0))
    return reached


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class Phases:
    """The durations of all phases of some executions, in nanoseconds."""

    count: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def add(self, spent: Spent) -> None:
        self.count += 1
        self.compute_input += spent.compute_input
        self.compute_infer += spent.compute_infer
        self.compute_output += spent.compute_output


@dataclass
class ModelCounters:
    """One version of one model."""

    ensemble: bool = False
    decoupled: bool = False
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    cached: bool = False  # the model uses the response cache
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    summaries: Summaries | None = None  # only where configured
    queue: Duration = field(default_factory=Duration)
    phases: Phases = field(default_factory=Phases)
    batches: dict[int, Phases] = field(default_factory=dict)  # by batch size
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    inferences: int = 0
    executions: int = 0
    last_inference_ms: int = 0  # since 1970
    pending: int = 0  # requests that the model has not begun to answer
    tokens: TokenLatencies = field(default_factory=TokenLatencies)

    def record(
        self,
        request: InferRequest,
        responses: ResponseStream,
        batch_size: int = 1,
        composing_models: ComposingModels | None = None,
    ) -> ResponseStream:
        """Return the answers to one request, with a counter around them."""
        return CountedResponses(self, request, responses, batch_size, composing_models or {})

    def succeed(self, spent: Spent, total: int, batch_size: int) -> None:
        """Count a request that took `total` nanoseconds."""
        self._answered(spent, total)
        self.phases.add(spent)
        if self.summaries is not None:
            self.summaries.compute(spent.compute_input, spent.compute_infer, spent.compute_output)
        self.inferences += batch_size
        self._execute(spent, batch_size)

    def _answered(self, spent: Spent, total: int) -> None:
        self.success.add(total)
        self.queue.add(spent.queue)
        self.last_inference_ms = time.time_ns() // 1_000_000
        if self.summaries is not None:
            self.summaries.request(None if self.cached else total, spent.queue)

    def succeed_from_cache(self, spent: Spent, total: int, ns: int) -> None:
        """Count a request that the model did not run: no inference and no execution."""
        self._answered(spent, total)
        self.cache_hit.add(ns)
        if self.summaries is not None:
            self.summaries.cache_hit.observe(ns // 1000)

    def miss_cache(self, ns: int) -> None:
        self.cache_miss.add(ns)
        if self.summaries is not None:
            self.summaries.cache_miss.observe(ns // 1000)

    def failed(self, reason: str, spent: Spent, total: int, batch_size: int) -> None:
        if self.ensemble and reason == "BACKEND":
            reason = "OTHER"  # an ensemble has no backend
        self.failures[reason] += 1
        self.fail.add(total)
        if not self.ensemble and reason != "REJECTED":
            self._execute(spent, batch_size)

    def _execute(self, spent: Spent, batch_size: int) -> None:
        self.executions += 1
        if batch_size not in self.batches:
            self.batches[batch_size] = Phases()
        self.batches[batch_size].add(spent)


class ComposingModel(NamedTuple):
    """A model whose work another model does."""

    name: str
    version: str  # empty where it is not loaded
    counters: ModelCounters


ComposingModels = Mapping[str, Callable[[], ComposingModel]]  # by phase of the request


class CounterTable(dict[tuple[str, str], ModelCounters]):
    """The counters of all models, by name and version."""

    def find_latest(self, name: str) -> ComposingModel:
        """Return the latest version of a model. Counts of one that is not loaded are not shown."""
        versions = [version for model, version in self if model == name]
        if not versions:
            return ComposingModel(name, "", ModelCounters())
        latest = max(versions, key=int)
        return ComposingModel(name, latest, self[name, latest])


class CountedResponses:
    """The answers to one request, counted as they are read."""

    def __init__(
        self,
        counters: ModelCounters,
        request: InferRequest,
        responses: ResponseStream,
        batch_size: int,
        composing_models: ComposingModels,
    ) -> None:
        self._counters = counters
        self._responses = responses
        self._composing_models = composing_models
        self._times = request.times
        self._model_and_id = request.model_name, request.id
        self._batch_size = batch_size
        self._began = time.monotonic_ns()
        self._waiting = True
        if self._times.trace is not None:
            begin_trace(self._times.trace, request, self._began)
        self._failure: str | None = None
        self._complete = False  # the last answer was read
        self._ended = False
        counters.pending += 1
        self._times.attach(self._begin_answering, counters.tokens, self._began)

    def __aiter__(self) -> CountedResponses:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            response = await self._responses.__anext__()
        except StopAsyncIteration:
            self._complete = True
            self._end()
            raise
        except BaseException as error:
            self._fail(error)
            set_error_context(error, *self._model_and_id)
            self._end()
            raise
        self._answer(response)
        return response

    async def aclose(self) -> None:
        if not self._ended:
            try:
                await self._responses.aclose()
            finally:
                self._end()

    def _fail(self, error: BaseException) -> None:
        self._failure = failure_reason(error)
        if self._times.trace is not None:
            self._times.trace.fail(error_type(error))

    def _begin_answering(self) -> None:
        if self._waiting:
            self._counters.pending -= 1
            self._waiting = False

    def _answer(self, response: InferResponse) -> None:
        if self._times.trace is not None:
            self._times.trace.tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
            self._times.trace.stamp("INFER_RESPONSE_COMPLETE")
        # Nothing follows these answers, so a reader that stops here has read all.
        only = not self._counters.decoupled and response.text_output is None
        self._complete = self._complete or response.final or only
        if response.error is not None:
            self._fail(response.error)
        elif not self._times.first_answer_ns:
            if self._waiting:
                self._begin_answering()
            self._times.first_answer_ns = time.monotonic_ns()
            if self._counters.decoupled:
                waited = (self._times.first_answer_ns - self._began) / 1e6
                self._counters.tokens.first_response_ms.observe(waited)

    def _end(self) -> None:
        self._ended = True
        if self._waiting:
            self._begin_answering()
        ended = time.monotonic_ns()
        total = ended - self._began
        steps: Mapping[str, Spent] = {}
        if self._composing_models:
            steps = spent_by_steps(self._began, ended, self._times)
        spent = self._own_spent(ended, steps)
        succeeded = self._complete and self._failure is None
        if self._times.cache_miss_ns:
            self._counters.miss_cache(self._times.cache_miss_ns)
        if succeeded and self._times.cache_hit_ns:
            self._counters.succeed_from_cache(spent, total, self._times.cache_hit_ns)
        elif succeeded:
            self._counters.succeed(spent, total, self._batch_size)
        else:
            self._counters.failed(self._failure or "CANCELED", spent, total, self._batch_size)
        if succeeded and (self._times.prompt_tokens or self._times.branches):
            self._counters.tokens.finish(self._times, total / 1e9)
        if self._composing_models:
            self._end_steps(steps, succeeded)
        if self._times.trace is not None:
            self._end_trace(self._times.trace, spent, steps, ended)
        self._times.add_to_ensemble(spent)
        self._times.detach()

    def _end_trace(
        self, trace: RequestTrace, spent: Spent, steps: Mapping[str, Spent], ended: int
    ) -> None:
        ensemble = self._counters.ensemble  # it computes nothing itself
        if ensemble and steps:
            models = {phase: find() for phase, find in self._composing_models.items()}
            trace_steps(trace, self._times, steps, models, self._model_and_id[1])
        end_trace(trace, self._times, None if ensemble else spent, ended)
        if not self._complete and self._failure is None:
            trace.fail(Code.CANCELLED.name)

    def _own_spent(self, ended: int, steps: Mapping[str, Spent]) -> Spent:
        """Return what the request spent in this model. That of an ensemble is in its steps."""
        if self._counters.ensemble and self._times.step_durations:
            return Spent(0, *self._times.step_durations)
        if self._counters.ensemble and len(steps) == len(PHASES) == len(self._composing_models):
            return Spent.total_of(steps.values())
        return Spent.between(self._began, ended, self._times)

    def _end_steps(self, steps: Mapping[str, Spent], succeeded: bool) -> None:
        """Count the request for the models whose work was done."""
        for phase, find in self._composing_models.items():
            spent = steps[phase]
            if succeeded:
                find().counters.succeed(spent, sum(spent), self._batch_size)
            elif phase == "compute_infer" and self._times.input_ended_ns:
                reason = self._failure or "CANCELED"
                find().counters.failed(reason, spent, sum(spent), self._batch_size)


def failure_reason(error: BaseException) -> str:
    """Return Triton's reason for a failure, one of four."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if not isinstance(error, InferenceError):
        return "OTHER"
    return {Code.UNAVAILABLE: "REJECTED", Code.CANCELLED: "CANCELED"}.get(error.code, "BACKEND")


class CountedModel(WrappedModel):
    """A model whose requests are counted. `composing_models`: the models whose work it does."""

    def __init__(
        self,
        model: ServedModel,
        counters: ModelCounters,
        composing_models: ComposingModels | None = None,
    ) -> None:
        super().__init__(model)
        self.counters = counters
        self._composing_models = composing_models
        counters.ensemble = bool(model.config.ensemble_steps)

    def infer(self, request: InferRequest) -> ResponseStream:
        # an ensemble is decoupled if a step is, and its steps may be replaced
        self.counters.decoupled = self.inner.decoupled
        items = batch_size(request, self.config)
        return CountedResponses(
            self.counters, request, self.inner.infer(request), items, self._composing_models or {}
        )
