"""The metrics port: Triton's names, and values that match the requests."""

import asyncio
import json
import weakref
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_memory import MemoryClient
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedLoop

from slipstream.engine.messages import EngineStats
from slipstream.server.http.server_info import serve_metrics
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ModelVersion,
    ServedModel,
)
from slipstream.server.metrics.engine_metrics import read_gauges
from slipstream.server.metrics.iteration_log import iteration_line
from slipstream.server.metrics.prometheus_text import Family
from slipstream.server.metrics.server_metrics import ModelCounters, ServerMetrics
from slipstream.server.metrics.statistics_api import counters_document

GOLDEN = Path(__file__).parents[1] / "conformance" / "golden"


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


def llm_request():
    return InferRequest("llm", "1", {})


async def read_all(counters, stream, batch_size=1):
    async with aclosing(counters.record(llm_request(), stream, batch_size)) as recorded:
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
async def test_failures_are_counted_by_reason(error, reason):
    counters = ModelCounters()
    with pytest.raises(type(error)):
        await read_all(counters, answers(then=error))
    if isinstance(error, InferenceError):
        await read_all(counters, answers(InferResponse(error=error)))
    assert counters.failures[reason] == sum(counters.failures.values()) > 0
    assert (counters.success.count, counters.pending) == (0, 0)


async def test_a_cancelled_reader_counts_as_cancelled_and_closes_the_model():
    closed = []

    async def endless():
        try:
            while True:
                yield InferResponse()
        finally:
            closed.append(True)

    counters = ModelCounters(decoupled=True)
    async with aclosing(counters.record(llm_request(), endless())) as recorded:
        await anext(recorded)
    assert (counters.failures["CANCELED"], counters.success.count) == (1, 0)
    assert closed == [True]


@pytest.mark.parametrize(
    ("decoupled", "response", "successes"),
    [(False, InferResponse(), 1), (True, InferResponse(final=True), 1), (True, InferResponse(), 0)],
)
async def test_a_reader_that_stops_at_the_last_response_counts_as_success(
    decoupled, response, successes
):
    counters = ModelCounters(decoupled=decoupled)
    async with aclosing(
        counters.record(llm_request(), answers(response, InferResponse()))
    ) as recorded:
        await anext(recorded)
    assert (counters.success.count, counters.failures["CANCELED"]) == (successes, 1 - successes)


async def test_pending_requests_have_no_response_yet():
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
    assert (counters.pending, counters.success.count) == (0, 1)


async def test_a_finished_request_drops_the_reference_to_its_counters():
    request = llm_request()
    recorded = ModelCounters().record(request, answers(InferResponse()))
    request.times.branch()
    assert [answer async for answer in recorded] == [InferResponse()]
    counting = weakref.ref(recorded)
    del recorded
    assert counting() is None


class Engine:
    info = ScriptedLoop().info
    stats = EngineStats(
        running=3,
        waiting=2,
        free_blocks=100,
        total_blocks=128,
        steps=77,
        cached_prompt_tokens=96,
        output_tokens=9,
        prompt_tokens=384,
        reused_blocks=3,
        context_requests=1,
        context_tokens=17,
        generation_requests=2,
        paused=1,
        preemptions=4,
        cancelled=5,
        queue_seconds=1.5,
        queue_counts=[2] + [0] * 10 + [1],
    )


def test_engine_gauges_show_the_engine_stats():
    metrics = ServerMetrics()
    metrics.watch_engine("tensorrt_llm", Engine())
    found = samples(metrics.render())

    def value(family, label, category):
        labels = sorted([f'{label}="{category}"', 'model="tensorrt_llm"', 'version="1"'])
        return found[f"nv_trt_llm_{family}{{{','.join(labels)}}}"]

    requests = {
        c: value("request_metrics", "request_type", c)
        for c in ("active", "max", "scheduled", "waiting")
    }
    assert requests == {"active": 5, "max": 64, "scheduled": 3, "waiting": 2}
    blocks = ("max", "free", "used", "tokens_per", "reused", "fraction")
    assert [value("kv_cache_block_metrics", "kv_cache_block_type", c) for c in blocks] == [
        128,
        100,
        28,
        32,
        3,
        28 / 128,
    ]
    batcher = ("inflight_batcher_metrics", "inflight_batcher_specific_metric")
    batches = ("generation_requests", "total_context_tokens", "paused_requests", "micro_batch_id")
    assert [value(*batcher, category) for category in batches] == [2, 17, 1, 0]
    assert value("request_metrics", "request_type", "context") == 1
    assert value("general_metrics", "general_type", "iteration_counter") == 77


def test_v1_batching_has_its_own_metrics_instead_of_inflight_batching():
    model = SimpleNamespace(
        config=SimpleNamespace(ensemble_steps=(), parameter={"gpt_model_type": "V1"}.get),
        decoupled=False,
        ready=True,
        composing_models={},
        cached=False,
    )
    metrics = ServerMetrics()
    metrics.watch_engine("old", Engine())
    metrics.watch_engine("new", Engine())
    metrics.count(SimpleNamespace(name="old", version="1", model=model))
    found = samples(metrics.render())
    place = 'model="old",v1_specific_metric="{}",version="1"'
    kinds = ("total_context_tokens", "total_generation_tokens", "empty_generation_slots")
    names = [f"nv_trt_llm_v1_metrics{{{place.format(kind)}}}" for kind in kinds]
    assert [found[name] for name in names] == [17, 2, 0]
    assert [name for name in found if name.startswith("nv_trt_llm_v1_")] == names
    batcher = [name for name in found if name.startswith("nv_trt_llm_inflight_batcher_metrics")]
    assert len(batcher) == 4
    assert all('model="new"' in name for name in batcher)
    metrics.forget("old")
    assert "nv_trt_llm_v1_metrics" not in metrics.render()


@pytest.mark.parametrize("v1_batching", [False, True])
def test_the_log_of_an_iteration_has_a_key_for_each_engine_metric(v1_batching):
    stats = replace(Engine.stats, timestamp_us=1_700_000_000_123_456)
    line = json.loads(iteration_line(Engine.info, stats, v1_batching))
    assert len(line) == len(read_gauges(Engine.info, stats, v1_batching)) == 22 - v1_batching
    assert ("MicroBatch ID" in line) != ("Empty Generation Slots" in line) == v1_batching
    assert (line["Active Request Count"], line["Total Context Tokens"]) == (5, 17)
    assert line["Fraction used KV cache blocks"] == 28 / 128
    assert line["Timestamp"].endswith(".123456")


def test_slipstream_metrics_show_the_engine_stats():
    metrics = ServerMetrics()
    metrics.watch_engine("tensorrt_llm", Engine())
    found = samples(metrics.render())
    place = '{model="tensorrt_llm",version="1"}'
    own = {
        "requests_running": 3,
        "requests_waiting": 2,
        "requests_preempted": 1,
        "preemptions_total": 4,
        "requests_cancelled_total": 5,
        "kv_blocks_used": 28,
        "kv_blocks_free": 100,
        "kv_blocks_reused_total": 3,
        "kv_cache_hit_rate": 0.25,
        "prompt_tokens_total": 384,
        "queue_seconds_count": 3,
        "queue_seconds_sum": 1.5,
    }
    assert {name: found[f"slipstream_{name}{place}"] for name in own} == own
    buckets = [
        found[f'slipstream_queue_seconds_bucket{{model="tensorrt_llm",version="1",le="{le}"}}']
        for le in ("0.001", "60", "+Inf")
    ]
    assert buckets == [2, 2, 3]


def test_counters_continue_after_an_engine_restart_and_gauges_do_not():
    class Alone(Engine):
        stats = replace(Engine.stats, finished=6, failed=7, adapter_loads=8, cached_blocks=9)

    class Later(Engine):
        thousands = {field.name: 1000 for field in fields(EngineStats)} | {
            "queue_counts": [1000] * 12
        }
        stats = Alone.stats.plus_totals_of(EngineStats(**thousands))

    def families(engine):
        metrics = ServerMetrics()
        metrics.watch_engine("llm", engine)
        parsed = text_string_to_metric_families(metrics.render())
        return {family.name: family for family in parsed if family.name.startswith("slipstream_")}

    later = families(Later())
    alone = families(Alone())
    assert {family.type for family in later.values()} == {"counter", "gauge", "histogram"}
    for name, family in later.items():
        for sample, own in zip(family.samples, alone[name].samples, strict=True):
            if family.type == "counter" or sample.name.endswith("_sum"):
                assert sample.value == own.value + 1000, sample
            elif family.type == "histogram":
                assert sample.value >= own.value + 1000, sample
            elif not name.endswith("_rate"):
                assert sample.value == own.value, sample


def recorded_heads():
    cases = map(json.loads, (GOLDEN / "grpc.jsonl").read_text("utf-8").splitlines())
    body = next(case["response"]["body"] for case in cases if case["case"] == "metrics-after")
    return [line for line in body.splitlines() if line.startswith("#")]


def test_families_have_the_help_and_type_lines_of_the_real_server():
    metrics = ServerMetrics()
    metrics.model("llm")
    heads = [
        line
        for line in metrics.render().splitlines()
        if line.startswith("#") and "nv_gpu" not in line
    ]
    assert [line for line in heads if "nv_energy" not in line] == recorded_heads()


async def test_token_histograms_count_each_token():
    metrics = ServerMetrics()
    counters = metrics.model("ensemble")
    request = llm_request()

    async def generating():
        for count in (1, 2, 0):
            request.times.add_tokens(40, count)
            yield InferResponse()

    async with aclosing(counters.record(request, generating())) as recorded:
        async for _ in recorded:
            pass
    found = samples(metrics.render())
    place = '{model="ensemble",version="1"}'
    counts = {
        name: found[f"slipstream_{name}_count{place}"]
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_seconds",
        )
    }
    assert counts == {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 2,
        "request_seconds": 1,
    }
    labels = 'model="ensemble",response_metric_type="total_{}_tokens",version="1"'
    assert found[f"nv_llm_input_token_len_sum{{{labels.format('input')}}}"] == 40
    assert found[f"nv_llm_output_token_len_sum{{{labels.format('output')}}}"] == 3
    assert found[f'nv_llm_input_token_len_bucket{{{labels.format("input")},le="10"}}'] == 0
    assert found[f'nv_llm_input_token_len_bucket{{{labels.format("input")},le="50"}}'] == 1


async def test_batches_count_as_many_inferences_as_they_have_items():
    counters = ModelCounters()
    await read_all(counters, answers(InferResponse()), batch_size=4)
    await read_all(counters, answers(InferResponse()))
    assert (counters.success.count, counters.inferences, counters.executions) == (2, 5, 2)
    sizes = [
        (entry["batch_size"], entry["compute_infer"]["count"])
        for entry in counters_document(counters, "m", "1")["batch_stats"]
    ]
    assert sizes == [(1, 1), (4, 1)]


async def test_a_model_error_is_an_execution_but_an_ensembles_is_not():
    for ensemble, executions, reason in ((False, 1, "BACKEND"), (True, 0, "OTHER")):
        counters = ModelCounters(ensemble=ensemble)
        await read_all(counters, answers(InferResponse(error=InferenceError("bad"))))
        assert (counters.executions, counters.failures[reason], counters.inferences) == (
            executions,
            1,
            0,
        )
        assert (counters.fail.count, counters.queue.count) == (1, 0)


async def test_durations_of_phases_add_up_to_the_request():
    counters = ModelCounters()
    request = llm_request()

    async def phased():
        request.times.leave_queue()
        request.times.end_input()
        await asyncio.sleep(0.001)
        request.times.end_infer()
        yield InferResponse()

    async with aclosing(counters.record(request, phased())) as recorded:
        async for _ in recorded:
            pass
    document = counters_document(counters, "m", "1")
    spent = document["inference_stats"]
    parts = [
        spent[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output")
    ]
    assert all(ns > 0 for ns in parts)
    assert sum(parts) == spent["success"]["ns"]
    assert spent["compute_infer"]["ns"] >= 1_000_000
    assert document["last_inference"] > 1_600_000_000_000


async def test_only_decoupled_models_have_a_first_response_histogram():
    metrics = ServerMetrics()
    metrics.model("once")
    metrics.model("stream").decoupled = True
    for name in ("once", "stream"):
        await read_all(metrics.model(name), answers(InferResponse(), InferResponse()))
    found = samples(metrics.render())
    assert found['nv_inference_first_response_histogram_ms_count{model="stream",version="1"}'] == 1
    assert 'nv_inference_first_response_histogram_ms_count{model="once",version="1"}' not in found


class ComposedModel(ServedModel):
    """A model that does the work of two others."""

    def __init__(self, config):
        self.config = config

    @property
    def composing_models(self):
        return {"compute_input": "pre", "compute_infer": "engine"}

    async def infer(self, request):
        request.times.end_input()
        yield InferResponse(error=InferenceError("no") if request.id == "bad" else None)


async def test_work_done_for_other_models_counts_for_them():
    metrics = ServerMetrics()
    config = SimpleNamespace(max_batch_size=0, ensemble_steps=("pre", "engine"), parameter={}.get)
    model = metrics.count(ModelVersion("chain", "1", ComposedModel(config)))
    metrics.model("pre")
    metrics.model("engine", "3")
    for id in ("", "bad"):
        async with aclosing(model.infer(InferRequest("chain", "1", {}, id=id))) as responses:
            async for _ in responses:
                pass
    found = samples(metrics.render())
    success = {
        name: found[f"nv_inference_request_success{{{name}}}"]
        for name in (
            'model="chain",version="1"',
            'model="pre",version="1"',
            'model="engine",version="3"',
        )
    }
    assert set(success.values()) == {1}
    assert found['nv_inference_request_failure{model="engine",reason="BACKEND",version="3"}'] == 1
    assert found['nv_inference_request_failure{model="pre",reason="BACKEND",version="1"}'] == 0


async def test_an_engine_has_the_tokens_of_the_models_that_use_it():
    metrics = ServerMetrics()
    config = SimpleNamespace(max_batch_size=0, ensemble_steps=("pre", "engine"), parameter={}.get)
    metrics.count(ModelVersion("chain", "1", ComposedModel(config)))
    metrics.model("engine").tokens.first_token_s.observe(0.5)
    metrics.model("chain").tokens.first_token_s.observe(0.25)

    def counted(model):
        found = samples(metrics.render())
        name = "slipstream_time_to_first_token_seconds"
        place = f'{{model="{model}",version="1"}}'
        return found.get(f"{name}_count{place}"), found.get(f"{name}_sum{place}")

    assert (counted("engine"), counted("chain")) == ((2, 0.75), (1, 0.25))
    assert 'slipstream_model_info{engine="engine",model="chain",version="1"} 1' in metrics.render()
    metrics.forget("chain")
    assert (counted("engine"), counted("chain")) == ((2, 0.75), (None, None))


def test_metrics_of_an_unloaded_model_are_removed():
    metrics = ServerMetrics()
    metrics.model("stays").success.add(1)
    metrics.model("goes").success.add(1)
    metrics.watch_engine("goes", Engine())
    metrics.forget("goes")
    text = metrics.render()
    assert 'model="goes"' not in text
    assert 'nv_inference_request_success{model="stays",version="1"} 1' in text
    assert metrics.model("goes").success.count == 0


def test_metrics_that_models_define_are_shown():
    metrics = ServerMetrics()
    metrics.add_source(
        lambda: [Family("mine", "counter", "What a model counts", [({"kind": "x"}, 2)])]
    )
    assert metrics.render().endswith(
        '# HELP mine What a model counts\n# TYPE mine counter\nmine{kind="x"} 2\n'
    )


def test_prometheus_library_parses_all_metrics():
    metrics = ServerMetrics()
    metrics.model("llm").tokens.first_token_s.observe(0.02)
    metrics.watch_engine("tensorrt_llm", Engine())
    families = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    assert families["slipstream_time_to_first_token_seconds"].type == "histogram"
    assert families["slipstream_queue_seconds"].type == "histogram"
    assert families["nv_inference_request_success"].type == "counter"
    assert families["nv_cpu_memory_total_bytes"].samples[0].value > 1 << 20


def test_label_values_are_escaped():
    metrics = ServerMetrics()
    metrics.model('a"b\\c\nd')
    assert 'model="a\\"b\\\\c\\nd"' in metrics.render()


async def call(app, method, path):
    client = MemoryClient(app)
    client.send(f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    head, _, body = (await client.settle()).decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ") for line in lines)
    return int(first.split()[1]), headers["content-type"], body


def without_cpu_metrics(rendered):
    """Return the lines without the CPU metrics, which change with time."""
    return [line for line in rendered.splitlines() if not line.startswith("nv_cpu_")]


async def test_metrics_port_responds_like_triton():
    metrics = ServerMetrics()
    metrics.model("llm")
    app = serve_metrics(metrics, ServerState([]))
    status, kind, body = await call(app, "GET", "/metrics")
    assert (status, kind) == (200, "text/plain; charset=utf-8")
    assert without_cpu_metrics(body) == without_cpu_metrics(metrics.render())
    assert await call(app, "GET", "/foo") == (200, "text/plain; charset=utf-8", "")
    assert await call(app, "GET", "/") == (200, "text/plain; charset=utf-8", "")
    assert await call(app, "POST", "/metrics") == (
        405,
        "text/plain",
        '{"error":"Method Not Allowed"}',
    )


async def test_the_metrics_port_has_the_health_probes():
    """Without a key, also where the HTTP port needs one."""
    state = ServerState([])
    app = serve_metrics(ServerMetrics(), state)
    assert await call(app, "GET", "/v2/health/live") == (200, "text/plain", "")
    assert await call(app, "GET", "/v2/health/ready") == (200, "text/plain", "")
    state.draining = True
    assert await call(app, "GET", "/v2/health/live") == (200, "text/plain", "")
    assert await call(app, "GET", "/v2/health/ready") == (400, "text/plain", "")
