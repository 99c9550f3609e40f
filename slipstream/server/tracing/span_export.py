"""Sends spans to a collector with OpenTelemetry's SDK: OTLP over HTTP, in batches, with retries.

This is the only module that imports the SDK, which the extra `slipstream[otel]` installs. A request
never waits for the collector: its spans go to a queue, and a thread of the SDK sends them. Spans
that do not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.spans import Attribute, ParentSpan, Span
from slipstream.server.tracing.tracing import Headers
from slipstream.version import VERSION

logger = logging.getLogger(__name__)

SCOPE = InstrumentationScope("triton-server", VERSION)  # the name that Triton's spans have
DEFAULT_SERVICE_NAME = "triton-inference-server"
FLUSH_SECONDS = 5.0  # time that a stopping server spends on sending the last spans
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MAX_REPORT_CHARACTERS = 300
# the SDK's modules that report trouble with the collector
_EXPORT_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
# the SDK's modules that report invalid headers
_HEADER_LOGGER = "opentelemetry.trace"


class SpanExport:
    """A queue of spans for one collector, and counters of the spans sent and dropped."""

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._attributes = _resource_attributes(settings.resource)
        self._resource = Resource.create(self._attributes)  # adds those of the SDK itself
        self._exporter = _CountingExporter(self, OTLPSpanExporter(endpoint=settings.url))
        self._processor: BatchSpanProcessor | None = None
        self._log = _CollectorLog(settings)
        self._lock = threading.Lock()  # never held while the collector is called
        self._closed = False  # no more spans are accepted
        self._finished = False  # the final numbers of the counters are known
        self._queued = 0  # spans in the SDK's queue
        self._sending = 0  # spans in the batch that is being sent
        self.exported = 0
        self.dropped = 0
        # Clients can send invalid headers as often as they like, and the SDK logs each of them.
        logging.getLogger(_HEADER_LOGGER).setLevel(logging.ERROR)

    def shown(self) -> dict[str, str | list[str]]:
        """Return the settings by the names that Triton shows them by."""
        return {
            "url": self._settings.address,
            "resource": [f"{name}={value!s}" for name, value in self._attributes.items()],
            "bsp_schedule_delay": str(self._settings.delay_ms),
            "bsp_max_export_batch_size": str(self._settings.batch_spans),
            "bsp_max_queue_size": str(self._settings.queue_spans),
        }

    def read_parent(self, headers: Headers) -> ParentSpan | None:
        """Return the caller's span from the headers `traceparent` and `tracestate`.

        None when they are missing or invalid: the request then starts its own trace.
        """
        context = get_current_span(_PROPAGATOR.extract(headers, getter=_GETTER)).get_span_context()
        if not context.is_valid:
            return None
        state = context.trace_state.to_header()
        return ParentSpan(f"{context.trace_id:032x}", f"{context.span_id:016x}", state)

    def add(self, spans: Sequence[Span]) -> None:
        """Queue the spans of one call, or drop all of them when there is no room for all."""
        with self._lock:
            full = self._queued + len(spans) > self._settings.queue_spans
            if self._closed or full or not self._start():
                self.dropped += len(spans)
                return
            self._queued += len(spans)
        assert self._processor is not None
        for span in spans:
            self._processor.on_end(_to_sdk(span, self._resource))

    def _start(self) -> bool:
        """Start the SDK's thread with the first spans. Return False when it cannot be started."""
        if self._processor is None:
            try:
                self._processor = BatchSpanProcessor(
                    self._exporter,
                    max_queue_size=self._settings.queue_spans,
                    schedule_delay_millis=self._settings.delay_ms,
                    max_export_batch_size=self._settings.batch_spans,
                )
            except RuntimeError as error:  # the system has no more threads
                self._log.report(str(error))
                return False
            self._log.attach()
        return True

    def count_start(self, spans: int) -> None:
        """Count a batch that the SDK has taken from its queue."""
        with self._lock:
            self._queued -= spans
            self._sending = spans

    def count_end(self, spans: int, success: bool) -> None:
        """Count a batch that was sent or given up."""
        with self._lock:
            if self._finished:
                return  # close() has counted it as dropped
            self._sending = 0
            if success:
                self.exported += spans
            else:
                self.dropped += spans
        if success:
            self._log.report_success()

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the queued spans. Drop those that are not sent within this time."""
        with self._lock:
            self._closed = True
        if self._processor is not None:
            # Its own limit is 30 seconds and cannot be changed.
            thread = threading.Thread(target=self._processor.shutdown, daemon=True)
            thread.start()
            thread.join(seconds)
            self._exporter.shutdown()  # ends the wait for a retry
        with self._lock:
            self.dropped += self._queued + self._sending
            self._finished = True
        self._log.detach()
        if self.dropped:
            logger.warning(
                "%d trace spans were dropped, %d went to %s",
                self.dropped,
                self.exported,
                self._settings.address,
            )


class _CountingExporter(SpanExporter):
    """Counts what the SDK's exporter sends."""

    def __init__(self, counts: SpanExport, exporter: OTLPSpanExporter) -> None:
        self._counts = counts
        self._exporter: SpanExporter = exporter
        self._stopped = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._counts.count_start(len(spans))
        result = SpanExportResult.FAILURE
        try:
            if not self._stopped.is_set():
                result = self._exporter.export(spans)
        finally:
            self._counts.count_end(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class _CollectorLog(logging.Handler):
    """Turns what the SDK logs about a collector into one line, until a batch is sent again.

    The SDK logs every attempt. Its texts contain the URL, whose query may hold a key, and words of
    the collector, which may hold control characters.
    """

    def __init__(self, settings: ExportSettings) -> None:
        super().__init__()
        self._address = settings.address
        self._query = settings.url.partition("?")[2]
        self._reported = False

    def attach(self) -> None:
        for name in _EXPORT_LOGGERS:
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).propagate = False

    def detach(self) -> None:
        for name in _EXPORT_LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.report(record.getMessage())

    def report(self, text: str) -> None:
        if self._reported:
            return
        self._reported = True
        if self._query:
            text = text.replace(self._query, "...")
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
        logger.warning(
            "the trace collector at %s: %s", self._address, text[:_MAX_REPORT_CHARACTERS]
        )

    def report_success(self) -> None:
        if self._reported:
            self._reported = False
            logger.info("the trace collector at %s takes spans again", self._address)


class _HeaderGetter(Getter[Any]):
    """Reads headers of HTTP and gRPC: pairs of text or bytes, with names in lower case."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        names = (key, key.encode())
        values = [
            value if isinstance(value, str) else value.decode("latin-1")
            for name, value in carrier
            if name in names
        ]
        if key == "traceparent" and len(values) != 1:
            return None  # two parents are as invalid as none
        return values or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name if isinstance(name, str) else name.decode("latin-1") for name, _ in carrier]


_PROPAGATOR = TraceContextTextMapPropagator()
_GETTER = _HeaderGetter()


def _resource_attributes(given: Mapping[str, str]) -> Mapping[str, AttributeValue]:
    """Combine Triton's default, OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME and the given ones."""
    default = Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME})
    return default.merge(OTELResourceDetector().detect()).merge(Resource(given)).attributes


class _FinishedSpan(ReadableSpan):
    """A span whose events were recorded elsewhere, some of them not at all."""

    events_dropped = 0

    @property
    def dropped_events(self) -> int:
        return self.events_dropped


def _to_sdk(span: Span, resource: Resource) -> ReadableSpan:
    finished = _FinishedSpan(
        name=_valid_text(span.name),
        context=_span_context(span, span.id),
        parent=_span_context(span, span.parent_id, span.remote_parent) if span.parent_id else None,
        resource=resource,
        attributes={name: _valid_value(value) for name, value in span.attributes.items()},
        events=[Event(name, timestamp=span.wall_ns + ns) for name, ns in span.events],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.wall_ns + span.began_ns,
        end_time=span.wall_ns + span.ended_ns,
        instrumentation_scope=SCOPE,
    )
    finished.events_dropped = span.events_dropped
    return finished


def _span_context(span: Span, span_id: str, remote: bool = False) -> SpanContext:
    return SpanContext(
        int(span.trace_id, 16),
        int(span_id, 16),
        is_remote=remote,
        trace_flags=_SAMPLED,
        trace_state=TraceState.from_header([span.state] if span.state else []),
    )


def _valid_value(value: Attribute) -> Attribute:
    return _valid_text(value) if isinstance(value, str) else value


def _valid_text(text: str) -> str:
    """Replace lone surrogates: the id of a request may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()
