"""A collector on a loopback port that reads spans with OpenTelemetry's own message types."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class CollectedSpan:
    name: str
    id: str
    parent_id: str
    trace_id: str
    state: str
    kind: int
    began: int
    ended: int
    events: list[tuple[str, int]]
    attributes: dict[str, Any]
    failed: bool
    events_dropped: int

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes
    message: ExportTraceServiceRequest


@dataclass
class Collector:
    """`with Collector() as collector:` listens at `collector.url`.

    `statuses`: the status codes of the first responses; the later ones are 200. `gate`: while it is
    cleared, no request gets a response. `listening=False`: connections are refused until `listen`.
    """

    statuses: Iterable[int] = ()
    listening: bool = True
    received: list[Received] = field(default_factory=list)
    tries: int = 0
    gate: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Collector:
        self._waiting_statuses = list(self.statuses)
        self.gate.set()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), _handler(self), bind_and_activate=False
        )
        self._server.daemon_threads = True
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        if self.listening:
            self.listen()
        return self

    def listen(self) -> None:
        self._server.server_activate()
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.gate.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(20)
        self._server.server_close()

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.tries += 1
        self.gate.wait(60)
        status = self._waiting_statuses.pop(0) if self._waiting_statuses else 200
        if status == 200:
            self.received.append(
                Received(path, headers, body, ExportTraceServiceRequest.FromString(body))
            )
        return status

    @property
    def spans(self) -> list[CollectedSpan]:
        scopes = [
            scope
            for one in list(self.received)
            for whole in one.message.resource_spans
            for scope in whole.scope_spans
        ]
        return [_collected(span) for scope in scopes for span in scope.spans]

    @property
    def text(self) -> str:
        """Everything received, to search for text that must not be in it."""
        return "".join(one.body.decode("latin-1") for one in self.received)

    def wait(self, roots: int = 1) -> list[CollectedSpan]:
        """Return all spans after this many calls have arrived; the root of a call comes last."""
        deadline = time.monotonic() + 20
        while sum(span.name == "InferRequest" for span in self.spans) < roots:
            assert time.monotonic() < deadline, self.spans
            time.sleep(0.01)
        return self.spans


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = collector.answer(
                self.path, {name.lower(): value for name, value in self.headers.items()}, body
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    return Handler


def attributes_of(pairs: Any) -> dict[str, Any]:
    found = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
    assert len(found) == len(pairs), "a name appears twice"
    return found


def _collected(span: Any) -> CollectedSpan:
    assert (len(span.trace_id), len(span.span_id)) == (16, 8)
    return CollectedSpan(
        span.name,
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_id.hex(),
        span.trace_state,
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        [(event.name, event.time_unix_nano) for event in span.events],
        attributes_of(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.dropped_events_count,
    )


def refused_port() -> socket.socket:
    """Return a socket that holds a port and does not listen."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
