"""Records a request as OpenTelemetry spans with Triton's names.

The span `InferRequest` is the call. Below it is one span for each model that worked on the call,
and below that the span `compute`. Events have the names of Triton's timestamps. The output of a
language model is described with the attributes of OpenTelemetry's conventions for generative AI.
Spans contain times, counts and names, never prompts or generated text.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slipstream.server.kserve.tensors import Tensor
from slipstream.server.tracing.tracing import Headers, RequestSampler

ROOT = "InferRequest"
COMPUTE = "compute"
PROVIDER = "slipstream"
MAX_EVENTS = 128  # per span; OpenTelemetry's default
MAX_SPANS = 1024  # per call; a Python model may call other models any number of times
MAX_TEXT = 256  # characters of an attribute
_MODEL_EVENTS = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
Attribute = str | int | float


class ParentSpan(NamedTuple):
    """The caller's span. Both ids are lower-case hexadecimal digits."""

    trace_id: str
    span_id: str
    state: str = ""  # W3C `tracestate`


@dataclass(slots=True)
class Span:
    """One span. It starts with its earliest event and ends with its latest.

    Times are `time.monotonic_ns()`; adding `wall_ns` makes them nanoseconds since 1970.
    """

    name: str
    trace_id: str
    parent_id: str  # empty for the first span of a trace
    state: str
    wall_ns: int
    remote_parent: bool = False
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    began_ns: int = 0
    ended_ns: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    events_dropped: int = 0
    attributes: dict[str, Attribute] = field(default_factory=dict)
    failed: bool = False

    def child(self, name: str) -> Span:
        return Span(name, self.trace_id, self.id, self.state, self.wall_ns)

    def add(self, event: str, ns: int) -> None:
        """Add an event. Above the limit, drop it unless it is the first of its name."""
        self.began_ns = min(self.began_ns, ns) or ns
        self.ended_ns = max(self.ended_ns, ns)
        if len(self.events) >= MAX_EVENTS and any(event == name for name, _ in self.events):
            self.events_dropped += 1
        else:
            self.events.append((event, ns))

    def fail(self, kind: str) -> None:
        """Mark the span as failed. The first failure counts: it is the cause of the others."""
        if not self.failed:
            self.failed = True
            self.attributes["error.type"] = kind


class Exporter(Protocol):
    """The interface of traces to the connection to a collector."""

    def read_parent(self, headers: Headers) -> ParentSpan | None: ...
    def add(self, spans: Sequence[Span]) -> None: ...


class SpanTraces:
    """Traces that go to a collector. Requests of a caller's trace are always traced."""

    def __init__(
        self, exporter: Exporter, sampler: RequestSampler, ids: itertools.count[int]
    ) -> None:
        self.exporter = exporter
        self.ids = ids
        self._sampler = sampler

    @property
    def remaining(self) -> int:
        return self._sampler.remaining

    def next(self, headers: Headers, operation: str) -> SpanTrace | None:
        sampled = self._sampler.sample()
        caller = self.exporter.read_parent(headers)
        if not sampled and caller is None:
            return None
        parent = caller or ParentSpan(os.urandom(16).hex(), "")
        wall_ns = time.time_ns() - time.monotonic_ns()
        root = Span(
            ROOT, parent.trace_id, parent.span_id, parent.state, wall_ns, remote_parent=True
        )
        return SpanTrace(next(self.ids), _Call(root, self, operation), root)

    def flush(self) -> None:
        """Do nothing: finished traces go to the exporter at once."""


@dataclass(slots=True)
class _Call:
    """The state that all requests of one call share."""

    root: Span
    traces: SpanTraces
    operation: str
    spans: list[Span] = field(default_factory=list)  # all spans except the root
    spans_left_out: int = 0

    def begin(self, parent: Span, name: str) -> Span:
        span = parent.child(name)
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.spans_left_out += 1
        return span


@dataclass(slots=True)
class SpanTrace:
    """The trace of one request to a model."""

    id: int
    call: _Call
    parent: Span
    parent_id: int = 0
    _model: Span | None = None
    _compute: Span | None = None

    @property
    def context(self) -> str:
        span = self._model or self.parent
        state = {"tracestate": span.state} if span.state else {}
        return json.dumps({"traceparent": f"00-{span.trace_id}-{span.id}-01", **state})

    def child(self) -> SpanTrace:
        return SpanTrace(next(self.call.traces.ids), self.call, self._model or self.parent, self.id)

    def sibling(self) -> SpanTrace:
        return SpanTrace(next(self.call.traces.ids), self.call, self.parent, self.parent_id)

    def model(self, name: str, version: str, request_id: str) -> None:
        span = self.call.begin(self.parent, name)
        self._model = span
        span.attributes |= {
            "triton.model_name": name,
            "triton.model_version": int(version),
            "triton.trace_id": self.id,
            "triton.trace_parent_id": self.parent_id,
        }
        if request_id:
            span.attributes["triton.request_id"] = request_id[:MAX_TEXT]

    def stamp(self, name: str, ns: int = 0) -> None:
        ns = ns or time.monotonic_ns()
        if self._model is not None and name in _MODEL_EVENTS:
            self._model.add(name, ns)
        elif self._model is not None and name.startswith("COMPUTE_"):
            if self._compute is None:
                self._compute = self.call.begin(self._model, COMPUTE)
            self._compute.add(name, ns)
        elif not self.parent_id:
            self.call.root.add(name, ns)

    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        """Record nothing: tensors contain prompts and generated text."""

    def generated(self, prompt_tokens: int, output_tokens: int, first_token_ns: int) -> None:
        span = self._model
        if span is None:
            return
        span.attributes |= {
            "gen_ai.operation.name": self.call.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": span.name,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
        }
        if first_token_ns:
            seconds = (first_token_ns - span.began_ns) / 1e9
            span.attributes["gen_ai.response.time_to_first_chunk"] = seconds

    def fail(self, kind: str) -> None:
        if self._model is not None:
            self._model.fail(kind)
        if not self.parent_id:
            self.call.root.fail(kind)

    def finish(self) -> None:
        root = self.call.root
        root.ended_ns = max(root.ended_ns, time.monotonic_ns())
        if self.call.spans_left_out:
            root.attributes["slipstream.spans_left_out"] = self.call.spans_left_out
        self.call.traces.exporter.add([*self.call.spans, root])
