"""Spans of a generation have the token counts and the time to the first token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from http_support import Connection, RunningServer, post, request_bytes
from openai_server import sdk
from span_collector import CollectedSpan, Collector

from slipstream.server.services import create_app, create_context
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.settings import TraceSettings

CALL = {"model": "ensemble", "prompt": "Say: ", "max_tokens": 4, "temperature": 0}
STEPS = {"preprocessing", "tensorrt_llm", "postprocessing"}
PARENT = "00-0af7651916cd43dd8448eb211c12666c-b7ad6b7169242424-01"


class Traced(NamedTuple):
    port: int
    client: openai.OpenAI
    collector: Collector


@pytest.fixture
def traced(serving: Any) -> Iterator[Traced]:
    with Collector() as collector:
        export = ExportSettings(url=collector.url, delay_ms=20)
        trace = TraceSettings({"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}, export)
        app = create_app(serving.registry, serving.state, create_context(trace=trace))
        with RunningServer(app) as server, sdk(server.port) as client:
            yield Traced(server.port, client, collector)
        trace.close()


def named(spans: list[CollectedSpan], name: str) -> list[CollectedSpan]:
    return [span for span in spans if span.name == name]


def test_spans_of_a_streamed_chat(traced: Traced) -> None:
    messages = [{"role": "user", "content": "the-secret-words"}]
    stream = traced.client.chat.completions.create(
        model="ensemble",
        messages=messages,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"traceparent": PARENT},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    spans = traced.collector.wait()
    (root,), (model,) = named(spans, "InferRequest"), named(spans, "ensemble")
    assert (root.trace_id, root.parent_id) == (PARENT[3:35], PARENT[36:52])
    assert model.parent_id == root.id
    assert {span.name for span in spans if span.parent_id == model.id} == STEPS
    first = model.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first * 1e9 <= model.ended - model.began
    assert model.attributes == {
        "triton.model_name": "ensemble",
        "triton.model_version": 1,
        "triton.request_id": chunks[0].id,
        "triton.trace_id": 1,
        "triton.trace_parent_id": 0,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": "ensemble",
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    assert not [span.name for span in spans if span.failed]
    assert "secret" not in traced.collector.text


def test_several_prompts_of_one_call_have_sibling_spans(traced: Traced) -> None:
    answer = traced.client.completions.create(**{**CALL, "prompt": ["a", "bcd"], "n": 2})
    spans = traced.collector.wait()
    (root,), models = named(spans, "InferRequest"), named(spans, "ensemble")
    assert [span.parent_id for span in models] == [root.id, root.id]
    assert {span.attributes["gen_ai.operation.name"] for span in models} == {"text_completion"}
    reported = [
        sum(span.attributes[f"gen_ai.usage.{side}_tokens"] for span in models)
        for side in ("input", "output")
    ]
    assert reported == [answer.usage.prompt_tokens, answer.usage.completion_tokens]


def test_spans_of_tritons_protocol_count_tokens(traced: Traced, serving: Any) -> None:
    body = json.dumps({"text_input": "bcd", "max_tokens": 4, "end_id": -1}).encode()
    assert post(traced.port, "/v2/models/ensemble/generate", body).status == 200
    (model,) = named(traced.collector.wait(), "ensemble")
    assert model.attributes["gen_ai.operation.name"] == "text_completion"
    assert model.attributes["gen_ai.usage.input_tokens"] == len(
        serving.generator.tokenizer.encode("bcd")
    )
    assert model.attributes["gen_ai.usage.output_tokens"] == 4


def test_the_span_of_a_disconnected_client_is_an_error_with_its_tokens(
    traced: Traced, serving: Any
) -> None:
    bias = {str(serving.generator.tokenizer.eos_id): -1000}
    body = json.dumps({**CALL, "max_tokens": 400, "stream": True, "logit_bias": bias}).encode()
    with Connection(traced.port) as connection:
        connection.send(request_bytes("POST", "/v1/completions", [], body))
        assert connection.head().status == 200
        assert connection.chunk().startswith(b"data: {")
    spans = traced.collector.wait()
    (root,), (model,) = named(spans, "InferRequest"), named(spans, "ensemble")
    assert (root.failed, model.failed) == (True, True)
    assert root.attributes["error.type"] == model.attributes["error.type"] == "CANCELLED"
    assert 0 < model.attributes["gen_ai.usage.output_tokens"] < 400
    assert "postprocessing" not in {span.name for span in spans}
