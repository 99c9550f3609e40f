"""The metrics port: Triton's names, and figures that equal what happened."""

import asyncio
from contextlib import aclosing

import pytest
from scripted_engine import ScriptedLoop

from slipstream.engine.messages import EngineStats
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferResponse
from slipstream.server.metrics import ModelCounters, ServerMetrics, metrics_app


def samples(text):
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def answers(*responses, then=None):
    for response in responses:
        await asyncio.sleep(0)
        yield response
    if then is not None:
        raise then


async def read_all(counters, stream):
    async with aclosing(counters.record(stream)) as recorded:
        return [response async for response in recorded]


async def test_a_request_with_several_answers_is_one_success():
    metrics = ServerMetrics()
    given = [InferResponse(), InferResponse(), InferResponse()]
    assert await read_all(metrics.model("llm"), answers(*given)) == given
    found = samples(metrics.render())
    assert found['nv_inference_request_success{model="llm",version="1"}'] == 1
    assert found['nv_inference_count{model="llm",version="1"}'] == 1
    assert found['nv_inference_exec_count{model="llm",version="1"}'] == 1
    assert found['nv_inference_request_duration_us{model="llm",version="1"}'] > 0
    assert found['nv_inference_pending_request_count{model="llm",version="1"}'] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InferenceError("bad field"), "BACKEND"),
        (InferenceError("engine gone", Code.UNAVAILABLE), "REJECTED"),
        (InferenceError("left", Code.CANCELLED), "CANCELED"),
        (RuntimeError("a bug"), "OTHER"),
    ],
)
async def test_each_failure_has_its_reason(error, reason):
    counters = ModelCounters()
    with pytest.raises(type(error)):
        await read_all(counters, answers(then=error))
    if isinstance(error, InferenceError):
        await read_all(counters, answers(InferResponse(error=error)))
    assert counters.failures[reason] == sum(counters.failures.values()) > 0
    assert (counters.successes, counters.pending) == (0, 0)


async def test_a_reader_that_leaves_counts_as_cancelled_and_the_model_is_closed():
    closed = []

    async def endless():
        try:
            while True:
                yield InferResponse()
        finally:
            closed.append(True)

    counters = ModelCounters()
    async with aclosing(counters.record(endless())) as recorded:
        await anext(recorded)
    assert (counters.failures["CANCELED"], counters.successes) == (1, 0)
    assert closed == [True]


async def test_pending_is_what_has_no_answer_yet():
    counters = ModelCounters()
    gate = asyncio.Event()

    async def slow():
        await gate.wait()
        yield InferResponse()

    reading = asyncio.create_task(read_all(counters, slow()))
    await asyncio.sleep(0)
    assert counters.pending == 1
    gate.set()
    await reading
    assert (counters.pending, counters.successes) == (0, 1)


class Engine:
    info = ScriptedLoop().info
    stats = EngineStats(
        running=3, waiting=2, free_blocks=100, total_blocks=128, steps=77, cached_prompt_tokens=96, output_tokens=9
    )


def test_engine_gauges_are_the_engines_own_figures():
    metrics = ServerMetrics()
    metrics.watch_engine("tensorrt_llm", Engine())
    found = samples(metrics.render())

    def value(family, label, category):
        labels = sorted([f'{label}="{category}"', 'model="tensorrt_llm"', 'version="1"'])
        return found[f"nv_trt_llm_{family}{{{','.join(labels)}}}"]

    requests = {c: value("request_metrics", "request_type", c) for c in ("active", "max", "scheduled", "waiting")}
    assert requests == {"active": 5, "max": 64, "scheduled": 3, "waiting": 2}
    blocks = ("max", "free", "used", "tokens_per", "reused", "fraction")
    assert [value("kv_cache_block_metrics", "kv_cache_block_type", c) for c in blocks] == [
        128, 100, 28, 32, 3, 28 / 128
    ]  # fmt: skip
    batcher = ("inflight_batcher_metrics", "inflight_batcher_specific_metric")
    assert value(*batcher, "generation_requests") == 3
    assert value("general_metrics", "general_type", "iteration_counter") == 77


RECORDED = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
"""


def test_families_have_the_help_and_type_lines_of_the_real_server():
    metrics = ServerMetrics()
    metrics.model("llm")
    assert [line for line in metrics.render().splitlines() if line.startswith("#")] == RECORDED.splitlines()


def test_label_values_are_escaped():
    metrics = ServerMetrics()
    metrics.model('a"b\\c\nd')
    assert 'model="a\\"b\\\\c\\nd"' in metrics.render()


async def call(app, method, path):
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    await app({"type": "http", "method": method, "path": path}, receive, send)
    headers = dict(sent[0]["headers"])
    return sent[0]["status"], headers[b"content-type"].decode(), sent[1]["body"].decode()


async def test_the_port_answers_as_tritons_does():
    metrics = ServerMetrics()
    metrics.model("llm")
    app = metrics_app(metrics)
    status, kind, body = await call(app, "GET", "/metrics")
    assert (status, kind) == (200, "text/plain; charset=utf-8")
    assert body == metrics.render()
    assert await call(app, "GET", "/foo") == (200, "text/plain; charset=utf-8", "")
    assert await call(app, "GET", "/") == (200, "text/plain; charset=utf-8", "")
    assert await call(app, "POST", "/metrics") == (405, "text/plain", '{"error":"Method Not Allowed"}')
