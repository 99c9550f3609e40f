"""OpenTelemetry spans equal those that the real server exported for the same calls."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_support import Client, RunningGrpc, message, recorded_registry
from http_support import RunningServer, get, post, wait_until
from span_collector import CollectedSpan, Collector, attributes_of, refused_port

from slipstream.server.kserve.health import ServerState
from slipstream.server.services import create_app, create_context
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.settings import TraceSettings

RECORDED = {
    case["case"]: case["spans"]
    for case in map(
        json.loads, (Path(__file__).parent / "golden" / "spans.jsonl").read_text().splitlines()
    )
}
PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01")
SERVER = 2  # the kind of a span


def tracing(collector: Collector, rate: int = 1, count: int = -1, **export: Any) -> TraceSettings:
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": str(rate), "trace_count": str(count)}
    return TraceSettings(
        settings, ExportSettings(**{"url": collector.url, "delay_ms": 20, **export})
    )


@contextmanager
def serving(trace: TraceSettings) -> Iterator[int]:
    app = create_app(recorded_registry()[0], ServerState([]), create_context(trace=trace))
    try:
        with RunningServer(app) as server:
            yield server.port
    finally:
        trace.close()


def infer(
    port: int, text: str = "z", model: str = "echo", headers: Any = (), request_id: str = ""
) -> int:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}
    body = {"inputs": [tensor]} | ({"id": request_id} if request_id else {})
    return post(port, f"/v2/models/{model}/infer", json.dumps(body).encode(), list(headers)).status


def shape(spans: list[dict[str, Any]]) -> list[Any]:
    """Return names, parents, events and attributes, with trace ids counted from 1."""
    names = {span["spanId"]: span["name"] for span in spans}
    first = min(
        int(span["attributes"]["triton.trace_id"])
        for span in spans
        if "triton.trace_id" in span["attributes"]
    )
    shaped = []
    for span in spans:
        about = {
            name: str(value) for name, value in span["attributes"].items() if name != "error.type"
        }
        for name in ("triton.trace_id", "triton.trace_parent_id"):
            if int(about.get(name, 0)):
                about[name] = str(int(about[name]) - first + 1)
        parent = span.get("parentSpanId", "")
        shaped.append(
            [
                span["name"],
                names.get(parent, parent),
                span["kind"],
                span.get("traceState", ""),
                span["events"],
                sorted(about.items()),
            ]
        )
    return sorted(shaped, key=str)


def as_recorded(spans: list[CollectedSpan]) -> list[dict[str, Any]]:
    return [
        {
            "name": span.name,
            "spanId": span.id,
            "parentSpanId": span.parent_id,
            "traceState": span.state,
            "kind": span.kind,
            "events": span.event_names,
            "attributes": span.attributes,
        }
        for span in spans
    ]


def only(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, [span.name for span in spans]
    return found[0]


@pytest.mark.parametrize("case", ["http", "http-context", "ensemble", "ensemble-error", "error"])
def test_http_calls_export_the_spans_of_the_real_server(case: str) -> None:
    calls = {
        "http": lambda port: infer(port, request_id="my-id"),
        "http-context": lambda port: infer(port, headers=[PARENT, ("tracestate", "a=b")]),
        "ensemble": lambda port: (
            post(port, "/v2/models/ens/generate", b'{"text_input": "a b"}').status
        ),
        "ensemble-error": lambda port: (
            post(port, "/v2/models/ens/generate", b'{"text_input": "error_first"}').status
        ),
        "error": lambda port: infer(port, "error", "oops_nd"),
    }
    with Collector() as collector, serving(tracing(collector)) as port:
        assert (calls[case](port) == 200) == ("error" not in case)
        found = collector.wait()
    assert shape(as_recorded(found)) == shape(RECORDED[case])
    assert len({span.trace_id for span in found}) == 1
    failed = {
        "ensemble-error": {"oops", "ens", "InferRequest"},
        "error": {"oops_nd", "InferRequest"},
    }
    assert {span.name for span in found if span.failed} == failed.get(case, set())
    assert {span.attributes.get("error.type") for span in found if span.failed} <= {
        "INTERNAL",
        "INVALID_ARG",
    }


def grpc_request(model: str, text: bytes) -> Any:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    raw = base64.b64encode(len(text).to_bytes(4, "little") + text).decode()
    return message(
        "ModelInfer",
        {"model_name": model, "id": "g", "inputs": [tensor], "raw_input_contents": [raw]},
    )


@pytest.mark.parametrize("case", ["grpc", "grpc-stream", "grpc-error"])
def test_grpc_calls_export_the_spans_of_the_real_server(case: str) -> None:
    with Collector() as collector:
        trace = tracing(collector)
        with RunningGrpc(
            recorded_registry()[0], ServerState([]), create_context(trace=trace)
        ) as server:
            with Client(server.port) as client:
                if case == "grpc-stream":
                    assert len(list(client.stream(iter([grpc_request("echo", b"grpc")])))) == 1
                elif case == "grpc":
                    client.unary("ModelInfer", grpc_request("echo", b"grpc"), metadata=[PARENT])
                else:
                    with pytest.raises(grpc.RpcError):
                        client.unary("ModelInfer", grpc_request("oops_nd", b"error"))
            found = collector.wait()
        trace.close()
    assert shape(as_recorded(found)) == shape(RECORDED[case])
    failed = {"oops_nd", "InferRequest"} if case == "grpc-error" else set()
    assert {span.name for span in found if span.failed} == failed
    if case == "grpc":
        assert {span.trace_id for span in found} == {"0af7651916cd43dd8448eb211c12666c"}


def test_all_requests_of_a_grpc_stream_have_its_parent_and_state() -> None:
    with Collector() as collector:
        trace = tracing(collector, rate=0)
        with RunningGrpc(
            recorded_registry()[0], ServerState([]), create_context(trace=trace)
        ) as server:
            with Client(server.port) as client:
                asked = [grpc_request("oops_nd", b"error")] * 2
                list(client.stream(iter(asked), metadata=[PARENT, ("tracestate", "k=v")]))
            roots = [span for span in collector.wait(2) if span.name == "InferRequest"]
        trace.close()
    assert [(span.parent_id, span.state, span.failed) for span in roots] == [
        ("b7ad6b7169242424", "k=v", True)
    ] * 2


def test_times_are_in_order_and_absolute() -> None:
    before = time.time_ns()
    with Collector() as collector, serving(tracing(collector)) as port:
        assert infer(port) == 200
        found = collector.wait()
    after = time.time_ns()
    root, model, compute = (only(found, name) for name in ("InferRequest", "echo", "compute"))
    ordered = [
        before,
        root.began,
        model.began,
        compute.began,
        compute.ended,
        model.ended,
        root.ended,
        after,
    ]
    assert ordered == sorted(ordered)
    for span in found:
        assert span.kind == SERVER
        times = [ns for _, ns in span.events]
        assert [span.began, *times, span.ended] == sorted([span.began, *times, span.ended])


def test_exports_carry_the_resource_attributes_and_the_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    resource = {"service.name": "x", "test.key": "test.value"}
    with Collector() as collector, serving(tracing(collector, resource=resource)) as port:
        infer(port)
        collector.wait()
        received = collector.received[0]
    assert (received.path, received.headers["content-type"]) == (
        "/v1/traces",
        "application/x-protobuf",
    )
    assert received.headers["x-key"] == "secret"
    about = attributes_of(received.message.resource_spans[0].resource.attributes)
    assert {"service.name": "x", "test.key": "test.value"}.items() <= about.items()
    assert received.message.resource_spans[0].scope_spans[0].scope.name == "triton-server"


def test_with_a_rate_of_0_only_requests_of_a_callers_trace_are_traced() -> None:
    bad = [
        "00-00000000000000000000000000000000-b7ad6b7169242424-01",
        "nonsense",
        "",
        "00-0af7651916cd43dd8448eb211c12666c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01",
        "00-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01-more",
        "00-0AF7651916CD43DD8448EB211C12666C-b7ad6b7169242424-01",
    ]
    with Collector() as collector, serving(tracing(collector, rate=0)) as port:
        for value in bad:
            assert infer(port, headers=[("traceparent", value)]) == 200
        assert infer(port, headers=[PARENT, PARENT]) == 200  # ambiguous
        assert infer(port) == 200
        unsampled = PARENT[1][:-1] + "0"
        newer = "01" + PARENT[1][2:] + "-more"
        assert (
            infer(
                port,
                headers=[("traceparent", unsampled), ("tracestate", "a=1"), ("tracestate", "b=2")],
            )
            == 200
        )
        assert infer(port, headers=[("traceparent", newer), ("tracestate", "x" * 600)]) == 200
        roots = [span for span in collector.wait(2) if span.name == "InferRequest"]
    assert [span.state for span in roots] == ["a=1,b=2", ""]
    assert {span.parent_id for span in roots} == {"b7ad6b7169242424"}


def test_rate_and_count_apply_to_requests_without_a_callers_trace() -> None:
    with Collector() as collector, serving(tracing(collector, rate=2, count=1)) as port:
        for number in range(6):
            infer(port, request_id=f"n{number}")
        infer(port, headers=[PARENT], request_id="asked for")
        models = [span for span in collector.wait(2) if span.name == "echo"]
        assert json.loads(get(port, "/v2/trace/setting").body)["trace_count"] == "0"
    assert [span.attributes["triton.request_id"] for span in models] == ["n1", "asked for"]


def test_a_request_that_reaches_no_model_exports_its_root_span() -> None:
    with Collector() as collector, serving(tracing(collector)) as port:
        assert post(port, "/v2/models/echo/infer", b'{"inputs": 3}').status == 500
        (root,) = collector.wait()
    assert (root.name, root.failed, root.attributes) == (
        "InferRequest",
        True,
        {"error.type": "INTERNAL"},
    )
    assert root.event_names == ["HTTP_RECV_START", "HTTP_RECV_END"]


def test_spans_contain_no_prompts_and_no_responses() -> None:
    with Collector() as collector, serving(tracing(collector)) as port:
        infer(port, "the-secret-text")
        infer(port, "the-secret-text", "oops_nd")
        asked = b'{"text_input": "the-secret-text", "max_tokens": 2, "stream": true}'
        post(port, "/v2/models/llm/generate_stream", asked)
        post(port, "/v2/models/echo/infer", b'{"inputs": [{"name": "the-secret-text"}]}')
        collector.wait(4)
    assert "secret" not in collector.text


def test_requests_succeed_with_a_slow_or_failing_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # seconds
    with Collector() as collector:
        collector.gate.clear()
        trace = tracing(collector, queue_spans=6, batch_spans=3)
        with serving(trace) as port:
            # while the collector does not respond
            assert [infer(port) for _ in range(20)] == [200] * 20
            # The spans of one call are being sent and those of two are queued. The last call ends
            # after its answer.
            wait_until(lambda: trace.exporter.dropped >= 3 * (20 - 3))
            assert collector.received == []
            collector.gate.set()
    with refused_port() as held:
        trace = tracing(collector, url=f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces")
        with serving(trace) as port:
            assert [infer(port) for _ in range(5)] == [200] * 5
    assert (trace.exporter.exported, trace.exporter.dropped) == (0, 15)


def test_settings_are_shown_and_changed_like_the_real_servers() -> None:
    resource = {"service.name": "x", "test.key": "test.value"}
    with (
        Collector() as collector,
        serving(tracing(collector, delay_ms=300, resource=resource)) as port,
    ):
        shown = get(port, "/v2/trace/setting").body.decode()
        assert shown == (
            '{"trace_level":["TIMESTAMPS"],"trace_rate":"1","trace_count":"-1","trace_mode":"opentelemetry",'
            f'"url":"{collector.url}","resource":"service.name=x","resource":"test.key=test.value",'
            '"bsp_schedule_delay":"300","bsp_max_export_batch_size":"512","bsp_max_queue_size":"2048"}'
        )

        def change(**wanted: Any) -> Any:
            return json.loads(post(port, "/v2/trace/setting", json.dumps(wanted).encode()).body)

        invalid = "Attempting to set invalid trace setting :"
        assert change(trace_rate="2")["trace_rate"] == "2"
        assert change(trace_rate="0") == {"error": invalid + "sample rate must be non-zero"}
        assert change(trace_count="0") == {"error": invalid}
        assert change(log_frequency="5") == {
            "error": invalid + "the mode opentelemetry has no log_frequency"
        }
        assert "error" not in change(log_frequency=None)
        tensors = change(trace_level=["TIMESTAMPS", "TENSORS"])
        assert tensors == {
            "error": invalid + "the mode opentelemetry has no level TENSORS, only TIMESTAMPS"
        }
        assert change(trace_level=["OFF"])["trace_level"] == ["OFF"]
        assert infer(port, headers=[PARENT]) == 200  # tracing is off now
    assert collector.spans == []
