"""A request as OpenTelemetry's spans, named as Triton names them: `InferRequest` is the call, below
it is a span for each model that worked on it, and below that `compute`. Events carry the names of
Triton's timestamps.

What a language model generated is told in the words of OpenTelemetry's conventions for generative
AI. A span holds times, counts and names; never what was asked or answered.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.server.kserve.tensors import Tensor
from slipstream.server.tracing.context import TraceContext, read_context
from slipstream.server.tracing.tracing import Headers, Turn

ROOT, COMPUTE = "InferRequest", "compute"
PROVIDER = "slipstream"
MOST_EVENTS = 128  # of one span: what OpenTelemetry allows by default
MOST_SPANS = 1024  # of one call: a Python model may ask others for as long as it answers
MOST_TEXT = 256  # characters of an attribute
_OF_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
Attribute = str | int | float


@dataclass(slots=True)
class Span:
    """It begins with its first event and ends with its last. Times are `time.monotonic_ns()`."""

    name: str
    trace_id: str
    parent_id: str  # empty for the first of a trace
    state: str
    wall_ns: int  # what turns one of its times into one since 1970
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    began_ns: int = 0
    ended_ns: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    events_dropped: int = 0
    attributes: dict[str, Attribute] = field(default_factory=dict)
    failed: bool = False

    def below(self, name: str) -> Span:
        return Span(name, self.trace_id, self.id, self.state, self.wall_ns)

    def add(self, event: str, ns: int) -> None:
        self.began_ns = min(self.began_ns, ns) or ns
        self.ended_ns = max(self.ended_ns, ns)
        if len(self.events) >= MOST_EVENTS and any(event == name for name, _ in self.events):
            self.events_dropped += 1  # a stream answers as often as it likes
        else:
            self.events.append((event, ns))

    def fail(self, kind: str) -> None:
        """The first failure is the one that tells why."""
        if not self.failed:
            self.failed = True
            self.attributes["error.type"] = kind


class SpanTraces:
    """Those that go to a collector. A request that a caller has put into a trace is always traced."""

    def __init__(
        self, export: Callable[[Sequence[Span]], None], turn: Turn, ids: itertools.count[int]
    ) -> None:
        self.export = export
        self.ids = ids
        self._turn = turn

    @property
    def left(self) -> int:
        return self._turn.left

    def next(self, headers: Headers, operation: str) -> SpanTrace | None:
        turn, context = self._turn.comes(), read_context(headers)
        if not turn and context is None:
            return None
        given = context or TraceContext(os.urandom(16).hex(), "")
        root = Span(
            ROOT, given.trace_id, given.span_id, given.state, time.time_ns() - time.monotonic_ns()
        )
        return SpanTrace(next(self.ids), _Whole(root, self, operation), root)

    def flush(self) -> None:
        """Nothing is kept here."""


@dataclass(slots=True)
class _Whole:
    """What all requests of one call share."""

    root: Span
    traces: SpanTraces
    operation: str
    spans: list[Span] = field(default_factory=list)  # but the root
    left_out: int = 0  # spans

    def begin(self, parent: Span, name: str) -> Span:
        span = parent.below(name)
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)
        else:
            self.left_out += 1
        return span


@dataclass(slots=True)
class SpanTrace:
    """One request to a model."""

    id: int
    whole: _Whole
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
        return SpanTrace(
            next(self.whole.traces.ids), self.whole, self._model or self.parent, self.id
        )

    def beside(self) -> SpanTrace:
        return SpanTrace(next(self.whole.traces.ids), self.whole, self.parent, self.parent_id)

    def model(self, name: str, version: str, request_id: str) -> None:
        self._model = span = self.whole.begin(self.parent, name)
        span.attributes |= {
            "triton.model_name": name,
            "triton.model_version": int(version),
            "triton.trace_id": self.id,
            "triton.trace_parent_id": self.parent_id,
        }
        if request_id:
            span.attributes["triton.request_id"] = request_id[:MOST_TEXT]

    def stamp(self, name: str, ns: int = 0) -> None:
        ns = ns or time.monotonic_ns()
        if self._model is not None and name in _OF_MODEL:
            self._model.add(name, ns)
        elif self._model is not None and name.startswith("COMPUTE_"):
            self._compute = self._compute or self.whole.begin(self._model, COMPUTE)
            self._compute.add(name, ns)
        elif not self.parent_id:
            self.whole.root.add(name, ns)

    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        """Never: they are what was asked and answered."""

    def generated(self, prompt_tokens: int, output_tokens: int, first_token_ns: int) -> None:
        if (span := self._model) is None:
            return
        span.attributes |= {
            "gen_ai.operation.name": self.whole.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": span.name,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
        }
        if first_token_ns:
            span.attributes["gen_ai.response.time_to_first_chunk"] = (
                first_token_ns - span.began_ns
            ) / 1e9

    def fail(self, kind: str) -> None:
        for span in (self._model, None if self.parent_id else self.whole.root):
            if span is not None:
                span.fail(kind)

    def finish(self) -> None:
        root = self.whole.root
        root.ended_ns = max(root.ended_ns, time.monotonic_ns())
        if self.whole.left_out:
            root.attributes["slipstream.spans_left_out"] = self.whole.left_out
        self.whole.traces.export([*self.whole.spans, root])
