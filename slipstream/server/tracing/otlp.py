"""Spans on their way to a collector: OTLP over HTTP, as JSON, from a thread of its own.

A request hands its spans over and goes on; what the collector does, or does not do, is never its
concern. What does not fit in the queue is dropped and counted. What a collector cannot take now is
kept, and tried again.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.server.metrics.families import Family
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.spans import Attribute, Span
from slipstream.version import VERSION

logger = logging.getLogger(__name__)

SCOPE = "triton-server"  # of Triton's spans, too
FLUSH_SECONDS = 5.0  # that a server which stops gives the last spans
_SERVER, _ERROR = 2, 2  # the kind of a span, the code of a status
_LATER = (429, 502, 503, 504)
_MOST_COMPLAINT = 200  # characters
_MOST_ANSWER = 65536  # bytes


class SpanExporter:
    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._pause_seconds = settings.delay_ms / 1000
        self._waiting: deque[Span] = deque()
        # held for moments only, never while a collector is spoken to
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._complained = False
        self._under_way = 0  # spans that are being sent
        self._handler = _Connections()
        self._opener = urllib.request.build_opener(_NoRedirects, self._handler)
        self.exported = 0
        self.dropped = 0

    def add(self, spans: Sequence[Span]) -> None:
        """The spans of one call, all or none of them."""
        with self._changed:
            if self._closing or len(self._waiting) + len(spans) > self._settings.queue_spans:
                self.dropped += len(spans)
                return
            self._waiting.extend(spans)
            if self._thread is None:
                self._thread = self._started_thread()
            if len(self._waiting) >= self._settings.batch_spans:
                self._changed.notify()

    def _started_thread(self) -> threading.Thread | None:
        thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        try:
            thread.start()
        except (
            RuntimeError
        ) as error:  # there are no more: the request goes on, the next one tries again
            self._complain(f"gets no spans: {error}")
            return None
        return thread

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what waits. What has not gone out by then is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(seconds)
        with self._changed:
            self.dropped += len(self._waiting) + self._under_way
            self._waiting.clear()
        if self.dropped:
            where = self._settings.address
            logger.warning(
                f"{self.dropped} trace spans were dropped, {self.exported} went to {where}"
            )

    def families(self) -> Iterable[Family]:
        taken, lost = (
            "Number of trace spans that the collector took",
            "Number of trace spans that were given up",
        )
        yield Family(
            "slipstream_trace_spans_exported_total", "counter", taken, [({}, self.exported)]
        )
        yield Family("slipstream_trace_spans_dropped_total", "counter", lost, [({}, self.dropped)])

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                done = self._deliver(batch)
            except (
                Exception
            ) as error:  # spans are not worth a thread: those that come after these still go out
                logger.error(f"trace spans cannot be sent: {error!r}")
                done = self._drop(batch)
            self._under_way = 0
            if not done and not self._keep(batch):
                return

    def _keep(self, batch: Sequence[Span]) -> bool:
        """For the next time. False where there is none."""
        with self._changed:
            self._waiting.extendleft(reversed(batch))
            return not self._changed.wait_for(lambda: self._closing, self._pause_seconds)

    def _next_batch(self) -> list[Span]:
        """Waits until there is one; empty at the end."""
        size = self._settings.batch_spans
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: self._closing or len(self._waiting) >= size, self._pause_seconds
                )
                if self._waiting or self._closing:
                    self._under_way = min(size, len(self._waiting))
                    return [self._waiting.popleft() for _ in range(self._under_way)]

    def _deliver(self, spans: Sequence[Span]) -> bool:
        """Whether that is the end of them; otherwise the collector may want them later."""
        try:
            answer = self._post(encode(spans, self._settings.resource))
        except urllib.error.HTTPError as error:
            if error.code in _LATER:
                self._complain(f"answers {error.code}, its spans are kept for later")
                return False
            self._complain(f"refuses spans: {error.code} {error.reason}")
            return self._drop(spans)
        except (OSError, http.client.HTTPException) as error:
            self._complain(f"cannot be reached, its spans are kept for later: {error}")
            return False
        rejected, why = _rejected(answer, len(spans))
        self.exported += len(spans) - rejected
        if rejected:
            self._complain(f"rejects spans: {why}")
        elif self._complained:
            logger.info(f"the trace collector at {self._settings.address} takes spans again")
            self._complained = False
        return self._drop(spans[:rejected])

    def _drop(self, spans: Sequence[Span]) -> bool:
        with self._changed:  # requests count here, too
            self.dropped += len(spans)
        return True

    def _post(self, body: bytes) -> bytes:
        """→ the beginning of the answer"""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"slipstream/{VERSION}",
            **self._settings.headers,
        }
        seconds = self._settings.timeout_seconds
        request = urllib.request.Request(self._settings.url, body, headers, method="POST")
        with (
            self._handler.at_most(seconds),
            self._opener.open(request, timeout=seconds) as response,
        ):
            try:
                return response.read1(_MOST_ANSWER)
            except (OSError, http.client.HTTPException):  # that it took them was said already
                return b""

    def _complain(self, what: str) -> None:
        """Once, until it is well again. What it answers with may be anything, and a log has lines."""
        if not self._complained:
            told = "".join(
                letter if letter.isprintable() else "?" for letter in what[:_MOST_COMPLAINT]
            )
            logger.warning(f"the trace collector at {self._settings.address} {told}")
            self._complained = True


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """One at a time. A socket's own timeout is for each piece of an answer, and there may be pieces
    for ever.
    """

    _current: http.client.HTTPConnection | None = None

    def do_open(self, http_class: Any, req: urllib.request.Request, **http_conn_args: Any) -> Any:
        def connection(*where: Any, **how: Any) -> http.client.HTTPConnection:
            self._current = http_class(*where, **how)
            return self._current

        return super().do_open(connection, req, **http_conn_args)

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._break_off)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._current = None

    def _break_off(self) -> None:
        connection = self._current
        if connection is not None and (open_socket := connection.sock) is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                open_socket.shutdown(socket.SHUT_RDWR)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What was sent would not go along."""

    def redirect_request(self, *about: Any) -> None:
        return None


class _Partial(msgspec.Struct, rename="camel"):
    rejected_spans: int = 0
    error_message: str = ""


class _Answer(msgspec.Struct, rename="camel"):
    partial_success: _Partial | None = None


def _rejected(answer: bytes, sent: int) -> tuple[int, str]:
    """How many of the spans that were sent the collector did not want after all, and why."""
    try:
        partial = (
            msgspec.json.decode(answer or b"{}", type=_Answer, strict=False).partial_success
            or _Partial()
        )
    except ValueError:  # it has taken them; what else it says is its own affair
        return 0, ""
    return max(0, min(partial.rejected_spans, sent)), partial.error_message


def encode(spans: Iterable[Span], resource: Mapping[str, str]) -> bytes:
    about = {
        "telemetry.sdk.name": "slipstream",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": VERSION,
    }
    scope = {
        "scope": {"name": SCOPE, "version": VERSION},
        "spans": [_document(span) for span in spans],
    }
    whole = {"resource": {"attributes": _attributes({**about, **resource})}, "scopeSpans": [scope]}
    return msgspec.json.encode({"resourceSpans": [whole]})


def _document(span: Span) -> dict[str, Any]:
    document: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.id,
        "name": _text(span.name),
        "kind": _SERVER,
        "startTimeUnixNano": str(span.wall_ns + span.began_ns),  # 64 bits are strings in this JSON
        "endTimeUnixNano": str(span.wall_ns + span.ended_ns),
        "attributes": _attributes(span.attributes),
        "events": [
            {"name": name, "timeUnixNano": str(span.wall_ns + ns)} for name, ns in span.events
        ],
    }
    given = {
        "parentSpanId": span.parent_id,
        "traceState": span.state,
        "droppedEventsCount": span.events_dropped,
        "status": {"code": _ERROR} if span.failed else None,
    }
    return document | {name: value for name, value in given.items() if value}


def _attributes(pairs: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    # All at once: what ends after its call, such as a Python model's own request, is told of while
    # it is sent.
    return [{"key": _text(name), "value": _value(value)} for name, value in tuple(pairs.items())]


def _value(value: Attribute) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": _text(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"intValue": str(value)}


def _text(text: str) -> str:
    """A request's id may hold bytes that are no text."""
    return text.encode("utf-8", "replace").decode()
