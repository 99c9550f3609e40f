"""How spans reach a collector, and that one which is slow, down or rude harms nobody."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from span_collector import Collector, refused_port
from tiny_server import wait_for

from slipstream.server.tracing.context import read_context
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.otlp import SpanExporter, encode
from slipstream.server.tracing.spans import MOST_EVENTS, MOST_SPANS, Span, SpanTraces
from slipstream.server.tracing.tracing import TEXT_COMPLETION, UNLIMITED, Turn


def spans(count: int, name: str = "InferRequest") -> list[Span]:
    made = [Span(name, f"{number + 1:032x}", "", "", 10**18) for number in range(count)]
    for span in made:
        span.add("HTTP_RECV_START", 5)
    return made


def settings(collector: Collector, **changes: int) -> ExportSettings:
    return ExportSettings(url=collector.url, **{"delay_ms": 20, **changes})


def counted(exporter: SpanExporter) -> dict[str, float]:
    return {family.name: family.samples[0][1] for family in exporter.families()}


def figures(exported: int, dropped: int) -> dict[str, int]:
    return {
        "slipstream_trace_spans_exported_total": exported,
        "slipstream_trace_spans_dropped_total": dropped,
    }


@contextlib.contextmanager
def by_hand(query: str = "", **changes: float) -> Iterator[tuple[SpanExporter, socket.socket, str]]:
    """An exporter with a span to send, what its collector would listen at, and that address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"
        exporter = SpanExporter(ExportSettings(url=address + query, **{"delay_ms": 20, **changes}))
        exporter.add(spans(1))
        yield exporter, listening, address
        exporter.close()


def test_batches_are_as_large_as_allowed_and_closing_sends_the_rest() -> None:
    with Collector() as collector:
        exporter = SpanExporter(settings(collector, batch_spans=3, delay_ms=600_000))
        exporter.add(spans(2))
        exporter.add(spans(2))
        wait_for(lambda: len(collector.spans) == 3)
        assert collector.tries == 1
        exporter.close()
        assert [
            len(one.message.resource_spans[0].scope_spans[0].spans) for one in collector.received
        ] == [3, 1]
        assert counted(exporter) == figures(4, 0)
        exporter.add(spans(1))  # too late
        assert counted(exporter) == figures(4, 1)


def test_a_collector_that_comes_later_gets_what_was_kept(capfd) -> None:
    with Collector(listening=False) as collector:
        exporter = SpanExporter(settings(collector))
        exporter.add(spans(2))
        wait_for(lambda: exporter._complained)
        collector.listen()
        assert len(collector.wait(2)) == 2
        exporter.close()
        assert counted(exporter) == figures(2, 0)
    said = capfd.readouterr().err
    assert said.count("cannot be reached, its spans are kept for later") == 1
    assert said.count("takes spans again") == 1


def test_what_a_collector_cannot_take_now_is_sent_again_and_what_it_refuses_is_not() -> None:
    with Collector(statuses=[503, 429, 400, 302]) as collector:
        exporter = SpanExporter(settings(collector, batch_spans=1))
        for number in range(3):
            exporter.add(spans(1, f"n{number}"))
        wait_for(lambda: len(collector.spans) == 1)
        exporter.close()
        assert collector.tries == 5  # a redirection is not followed
        assert [span.name for span in collector.spans] == ["n2"]
        assert counted(exporter) == figures(1, 2)


def test_a_collector_that_does_not_answer_costs_spans_and_nothing_else(capfd) -> None:
    with Collector() as collector:
        collector.gate.clear()
        exporter = SpanExporter(settings(collector, queue_spans=6, batch_spans=2))
        exporter.add(spans(2))
        wait_for(lambda: collector.tries == 1)
        exporter.add(spans(4))
        exporter.add(spans(3))  # no room for all three, so for none
        exporter.add(spans(2))
        assert counted(exporter) == figures(0, 3)
        exporter.close(0.1)  # returns though nobody has been answered
        assert collector.received == []
        assert counted(exporter) == figures(0, 11)
    assert "11 trace spans were dropped, 0 went to" in capfd.readouterr().err


def test_a_full_queue_before_a_collector_that_is_down_is_given_up_at_the_end() -> None:
    with refused_port() as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces"
        exporter = SpanExporter(
            ExportSettings(url=url, queue_spans=4, batch_spans=4, delay_ms=600_000)
        )
        exporter.add(spans(4))
        wait_for(lambda: exporter._complained)
        exporter.close()
    assert counted(exporter) == figures(0, 4)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            b"\x1b[31mno\x07\r\nI1115 forged",
            "cannot be reached, its spans are kept for later: ?[31mno?",
        ),
        (b"HTTP/1.1 400 \x1b[31mno" + b"o" * 9000 + b"\r\n\r\n", "refuses spans: 400 ?[31mno"),
    ],
)
def test_what_a_collector_says_is_one_short_line_and_its_address_has_no_key(
    answer: bytes, told: str, capfd
) -> None:
    with by_hand("?key=secret") as (exporter, listening, address):
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(65536).startswith(b"POST /v1/traces?key=secret ")
            connection.sendall(answer)
        wait_for(lambda: exporter._complained)
        listening.close()
    said = capfd.readouterr().err
    assert f"the trace collector at {address} {told}" in said
    assert len(said.splitlines()) == 2  # the other one is of what was given up
    assert len(said) < 700
    assert "\x1b" not in said
    assert "secret" not in said
    assert "secret" not in str(ExportSettings(url=f"{address}?key=secret").shown())


@pytest.mark.parametrize(
    ("says", "exported", "told"),
    [
        (
            b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}',
            3,
            "rejects spans: too old",
        ),
        (b'{"partialSuccess": {"rejectedSpans": 99}}', 0, "rejects spans: "),
        (b'{"partialSuccess": {"errorMessage": "all is well"}}', 5, ""),
        (b'{"partialSuccess": 7}', 5, ""),
        (b"", 5, ""),
    ],
)
def test_what_a_collector_rejects_is_not_counted_as_taken(
    says: bytes, exported: int, told: str, capfd
) -> None:
    with Collector(says=says) as collector:
        exporter = SpanExporter(settings(collector))
        exporter.add(spans(5))
        wait_for(lambda: sum(counted(exporter).values()) == 5)
        exporter.close()
    assert counted(exporter) == figures(exported, 5 - exported)
    said = capfd.readouterr().err
    assert told in said
    assert ("rejects" in said) == bool(told)


def test_a_collector_that_took_spans_and_says_no_more_does_not_get_them_twice() -> None:
    with by_hand(timeout_seconds=0.2) as (exporter, listening, _):
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n")
            wait_for(lambda: counted(exporter) == figures(1, 0))
    assert counted(exporter) == figures(1, 0)


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"H"])
def test_a_collector_whose_answer_never_ends_is_broken_off(piece: bytes) -> None:
    with by_hand(timeout_seconds=0.3) as (exporter, listening, _):
        connection, _ = listening.accept()
        # by which the other end is known to have left
        with connection, contextlib.suppress(OSError):
            for _ in range(2_000):
                connection.sendall(piece)
                time.sleep(0.01)
            pytest.fail("it is still listened to")
        again, _ = listening.accept()
        with again:
            again.recv(65536)
            again.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            wait_for(lambda: counted(exporter)["slipstream_trace_spans_exported_total"] > 0)
    assert counted(exporter) == figures(1, 0)


def test_a_span_may_be_told_of_while_it_is_sent() -> None:
    class Late(str):
        def encode(self, *how: str) -> bytes:
            span.attributes["late"] = 1
            return super().encode(*how)

    (span,) = spans(1)
    span.attributes["triton.request_id"] = Late("a")
    assert b'"stringValue":"a"' in encode([span], {})
    assert "late" in span.attributes


def test_events_of_a_long_stream_are_bounded_and_its_last_ones_stay() -> None:
    with Collector() as collector:
        exporter = SpanExporter(settings(collector))
        (span,) = spans(1)
        for number in range(1000):
            span.add("INFER_RESPONSE_COMPLETE", 10 + number)
        span.add("HTTP_SEND_END", 2000)
        exporter.add([span])
        (found,) = collector.wait()
        exporter.close()
    assert len(found.events) == MOST_EVENTS + 1
    assert found.events_dropped == 1001 - MOST_EVENTS
    assert (found.events[0], found.events[-1]) == (
        ("HTTP_RECV_START", 10**18 + 5),
        ("HTTP_SEND_END", 10**18 + 2000),
    )
    assert (found.began, found.ended) == (10**18 + 5, 10**18 + 2000)


def test_spans_of_one_call_are_bounded_and_those_left_out_are_counted() -> None:
    exported: list[Sequence[Span]] = []
    trace = SpanTraces(exported.append, Turn(1, UNLIMITED), itertools.count(1)).next(
        (), TEXT_COMPLETION
    )
    trace.model("caller", "1", "x" * 1000)
    for _ in range(MOST_SPANS + 6):
        trace.child().model("called", "1", "")
    trace.finish()
    (spans_of_call,) = exported
    assert len(spans_of_call) == MOST_SPANS + 1
    assert spans_of_call[-1].attributes == {"slipstream.spans_left_out": 7}
    assert spans_of_call[0].attributes["triton.request_id"] == "x" * 256


def test_a_state_that_is_no_text_is_not_passed_on() -> None:
    parent = (b"traceparent", b"00-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01")
    for state, passed in ((b"a=b", "a=b"), (b"a=\xff", ""), (b"a=\x1b", "")):
        assert read_context([parent, (b"tracestate", state)]).state == passed


def test_an_id_that_is_no_text_goes_out_as_well_as_it_can() -> None:
    with Collector() as collector:
        exporter = SpanExporter(settings(collector))
        (span,) = spans(1)
        span.attributes["triton.request_id"] = b"a\xffb".decode("utf-8", "surrogateescape")
        exporter.add([span])
        (found,) = collector.wait()
        exporter.close()
    assert found.attributes == {"triton.request_id": "a?b"}
