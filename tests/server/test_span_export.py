"""How spans reach a collector, and that a slow, missing or faulty one affects no request."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Sequence

import pytest
from span_collector import Collector, refused_port
from tiny_server import wait_for

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.settings import TraceSettings
from slipstream.server.tracing.span_export import SpanExport
from slipstream.server.tracing.spans import MAX_EVENTS, MAX_SPANS, ParentSpan, Span, SpanTraces
from slipstream.server.tracing.tracing import TEXT_COMPLETION, UNLIMITED, Headers, RequestSampler

TIMEOUT = "OTEL_EXPORTER_OTLP_TIMEOUT"  # in seconds, as the SDK reads it


def make_spans(count: int, name: str = "InferRequest") -> list[Span]:
    spans = [Span(name, f"{number + 1:032x}", "", "", 10**18) for number in range(count)]
    for span in spans:
        span.add("HTTP_RECV_START", 5)
    return spans


def settings(collector: Collector, **changes: int) -> ExportSettings:
    return ExportSettings(url=collector.url, **{"delay_ms": 20, **changes})


def counts(export: SpanExport) -> tuple[int, int]:
    return export.exported, export.dropped


def batch_sizes(collector: Collector) -> list[int]:
    return [
        len(received.message.resource_spans[0].scope_spans[0].spans)
        for received in collector.received
    ]


def test_full_batches_are_sent_at_once_and_closing_sends_the_rest() -> None:
    with Collector() as collector:
        export = SpanExport(settings(collector, batch_spans=3, delay_ms=600_000))
        export.add(make_spans(2))
        export.add(make_spans(2))
        wait_for(lambda: len(collector.spans) == 3)
        assert collector.tries == 1
        export.close()
        assert batch_sizes(collector) == [3, 1]
        assert counts(export) == (4, 0)
        export.add(make_spans(1))  # after the close
        assert counts(export) == (4, 1)


def test_a_collector_that_starts_late_gets_the_spans(capfd: pytest.CaptureFixture[str]) -> None:
    with Collector(listening=False) as collector:
        export = SpanExport(settings(collector))
        export.add(make_spans(2))
        parts: list[str] = []

        def read_log() -> str:
            parts.append(capfd.readouterr().err)
            return "".join(parts)

        wait_for(lambda: "Connection refused" in read_log())
        collector.listen()
        assert len(collector.wait(2)) == 2
        export.close()
        assert counts(export) == (2, 0)
    lines = read_log()
    assert lines.count(f"the trace collector at {collector.url}: ") == 1
    assert lines.count(f"the trace collector at {collector.url} takes spans again") == 1
    assert len(lines.splitlines()) == 2


def test_a_busy_collector_gets_spans_again_and_one_that_rejects_them_does_not() -> None:
    with Collector(statuses=[503, 400]) as collector:
        export = SpanExport(settings(collector, batch_spans=1))
        export.add(make_spans(1, "rejected"))
        wait_for(lambda: counts(export) == (0, 1))
        export.add(make_spans(1, "accepted"))
        wait_for(lambda: counts(export) == (1, 1))
        export.close()
        assert collector.tries == 3
        assert [span.name for span in collector.spans] == ["accepted"]


def test_a_collector_that_does_not_respond_loses_only_spans(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Collector() as collector:
        collector.gate.clear()
        export = SpanExport(settings(collector, queue_spans=6, batch_spans=2))
        export.add(make_spans(2))
        wait_for(lambda: collector.tries == 1)
        export.add(make_spans(4))
        export.add(make_spans(3))  # the queue has room for two of them
        export.add(make_spans(2))
        assert counts(export) == (0, 3)
        export.close(0.1)
        assert collector.received == []
        assert counts(export) == (0, 11)
    assert "11 trace spans were dropped, 0 went to" in capfd.readouterr().err
    assert counts(export) == (0, 11)  # also after the collector has responded


def test_spans_in_the_queue_are_lost_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0.5")
    with refused_port() as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces"
        export = SpanExport(ExportSettings(url=url, queue_spans=4, batch_spans=4))
        export.add(make_spans(4))
        wait_for(lambda: counts(export) == (0, 4))
        export.add(make_spans(3))
        export.close()
    assert counts(export) == (0, 7)


def test_counters_of_spans_are_metrics() -> None:
    with Collector(statuses=[400]) as collector:
        export = SpanExport(settings(collector))
        export.add(make_spans(2))
        wait_for(lambda: counts(export) == (0, 2))
        export.add(make_spans(3))
        wait_for(lambda: counts(export) == (3, 2))
        export.close()
    metrics = ServerMetrics()
    metrics.watch_span_export(export)
    lines = metrics.render().splitlines()
    assert "slipstream_trace_spans_exported_total 3" in lines
    assert "slipstream_trace_spans_dropped_total 2" in lines


def test_export_errors_are_one_short_line_without_control_characters_or_the_key(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"
        export = SpanExport(ExportSettings(url=f"{address}?key=secret", delay_ms=20))
        export.add(make_spans(1))
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(65536).startswith(b"POST /v1/traces?key=secret ")
            reason = b"\x1b[31mno" + b"o" * 9000
            connection.sendall(b"HTTP/1.1 400 " + reason + b"\r\nContent-Length: 0\r\n\r\n")
        wait_for(lambda: export.dropped == 1)
        export.close()
    lines = capfd.readouterr().err
    assert f"the trace collector at {address}: " in lines
    assert "code: 400, reason: ?[31mno" in lines
    assert len(lines.splitlines()) == 2  # the other line gives the number of dropped spans
    assert len(lines) < 800
    assert "\x1b" not in lines
    assert "secret" not in lines
    assert "secret" not in str(export.shown())


def test_a_refused_connection_is_logged_without_the_key(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT, "0.5")
    with refused_port() as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces?key=secret"
        export = SpanExport(ExportSettings(url=url, delay_ms=20))
        export.add(make_spans(1))
        wait_for(lambda: export.dropped == 1)
        export.close()
    lines = capfd.readouterr().err
    assert "trace collector" in lines
    assert "secret" not in lines


def test_events_of_a_long_stream_are_bounded_and_its_last_events_stay() -> None:
    with Collector() as collector:
        export = SpanExport(settings(collector))
        (span,) = make_spans(1)
        for number in range(1000):
            span.add("INFER_RESPONSE_COMPLETE", 10 + number)
        span.add("HTTP_SEND_END", 2000)
        export.add([span])
        (found,) = collector.wait()
        export.close()
    assert len(found.events) == MAX_EVENTS + 1
    assert found.events_dropped == 1001 - MAX_EVENTS
    assert (found.events[0], found.events[-1]) == (
        ("HTTP_RECV_START", 10**18 + 5),
        ("HTTP_SEND_END", 10**18 + 2000),
    )
    assert (found.began, found.ended) == (10**18 + 5, 10**18 + 2000)


class FakeExporter:
    def __init__(self) -> None:
        self.calls: list[Sequence[Span]] = []

    def read_parent(self, headers: Headers) -> ParentSpan | None:
        return None

    def add(self, spans: Sequence[Span]) -> None:
        self.calls.append(spans)


def test_spans_of_one_call_are_bounded_and_those_left_out_are_counted() -> None:
    exporter = FakeExporter()
    traces = SpanTraces(exporter, RequestSampler(1, UNLIMITED), itertools.count(1))
    trace = traces.next((), TEXT_COMPLETION)
    assert trace is not None
    trace.model("caller", "1", "x" * 1000)
    for _ in range(MAX_SPANS + 6):
        trace.child().model("called", "1", "")
    trace.finish()
    (spans,) = exporter.calls
    assert len(spans) == MAX_SPANS + 1
    assert spans[-1].attributes == {"slipstream.spans_left_out": 7}
    assert spans[0].attributes["triton.request_id"] == "x" * 256


@pytest.mark.parametrize(
    ("state", "expected"), [(b"a=b", "a=b"), (b"a=\xff", ""), (b"a=\x1b", ""), (b"x" * 600, "")]
)
def test_only_a_valid_state_of_the_caller_is_passed_on(
    state: bytes, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = (b"traceparent", b"00-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01")
    export = SpanExport(ExportSettings())
    found = export.read_parent([parent, (b"tracestate", state)])
    assert found == ("0af7651916cd43dd8448eb211c12666c", "b7ad6b7169242424", expected)
    assert capfd.readouterr().err == ""  # a client cannot fill the log


def test_a_request_id_that_is_not_unicode_is_sent_with_replacement_characters() -> None:
    with Collector() as collector:
        export = SpanExport(settings(collector))
        (span,) = make_spans(1)
        span.attributes["triton.request_id"] = b"a\xffb".decode("utf-8", "surrogateescape")
        export.add([span])
        (found,) = collector.wait()
        export.close()
    assert found.attributes == {"triton.request_id": "a?b"}


def test_resource_attributes_of_the_command_line_win_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SpanExport(ExportSettings()).shown()["resource"] == [
        "service.name=triton-inference-server"
    ]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a%20b,region=here")
    export = SpanExport(ExportSettings(resource={"region": "there"}))
    assert sorted(export.shown()["resource"]) == [
        "region=there",
        "service.name=chat",
        "team=a b",
    ]


def test_without_the_sdk_the_mode_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.server.tracing.span_export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InferenceError) as refused:
        TraceSettings({"trace_level": ["TIMESTAMPS"]}, ExportSettings())
    assert refused.value.message == (
        "the trace mode opentelemetry needs the OpenTelemetry SDK; "
        "install it with: pip install 'slipstream[otel]'"
    )
