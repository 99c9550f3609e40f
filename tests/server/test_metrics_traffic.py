"""Metrics and statistics equal what the client counted, on a real engine."""

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from grpc_stack import ask, request, running, samples, text_inputs, token_inputs, until
from tiny_engine import build_tiny_engine
from tritonclient.utils import InferenceServerException

import slipstream
from slipstream.server.metrics.machine import Gpus, Machine
from slipstream.server.metrics.server_metrics import ServerMetrics

DASHBOARD = Path(slipstream.__file__).parent / "server" / "metrics" / "grafana.json"


class Driver:
    """A fake of the driver library with two GPUs."""

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, uuid, size):
        uuid.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, found):
        found._obj.gpu = 25 * handle.value
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle, found):
        assert found._obj.version == 0x2000028
        found._obj.total = 1000
        found._obj.used = 100 * handle.value
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, found):
        found._obj.value = 70_500
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle, found):
        found._obj.value = 700_000
        return 0 if handle.value == 1 else 3  # the second GPU does not support it

    energy = 5_000_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, found):
        self.energy += 1000
        found._obj.value = self.energy
        return 0


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return build_tiny_engine(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stack(engine_folder, tmp_path):
    metrics = ServerMetrics(Machine(Gpus(Driver())))
    async with running(engine_folder, tmp_path, metrics=metrics) as found:
        yield found


PROMPT = list(range(2, 70))


class Traffic:
    """Sends requests and counts the responses."""

    def __init__(self):
        self.successes = self.errors = self.refused = self.cancelled = self.tokens = (
            self.prompt_tokens
        ) = 0
        self.responses = 0

    async def run(self, stack):
        for count, stream in ((5, True), (7, True), (4, False)):
            await self.generate(stack, count, stream)
        for result, error in await ask(
            stack.client, request("tensorrt_llm", token_inputs(PROMPT, 0))
        ):
            assert result is None
            self.errors += "request_output_len" in error.message()
        with pytest.raises(InferenceServerException):
            await stack.client.infer("nope", token_inputs(PROMPT, 1))
        self.refused += 1
        await self.leave(stack)

    async def generate(self, stack, count, stream):
        answers = await ask(
            stack.client, request("tensorrt_llm", token_inputs(PROMPT, count, stream))
        )
        assert [error for _, error in answers] == [None] * len(answers)
        ids = [
            token
            for result, _ in answers
            for token in result.as_numpy("output_ids").ravel().tolist()
        ]
        self.tokens += len(ids)
        self.prompt_tokens += len(PROMPT)
        self.successes += 1
        self.responses += len(answers)

    async def leave(self, stack):
        async def sending():
            yield request("tensorrt_llm", token_inputs(PROMPT, 180))

        answers = stack.client.stream_infer(sending())
        await anext(answers)
        answers.cancel()
        self.cancelled += 1
        self.prompt_tokens += len(PROMPT)
        await until(lambda: stack.engine.outstanding == 0)


async def test_metrics_equal_the_counts_of_the_client(stack):
    traffic = Traffic()
    await traffic.run(stack)
    await until(lambda: stack.engine.stats.finished == 4 and stack.engine.stats.running == 0)
    assert (traffic.successes, traffic.errors, traffic.cancelled) == (3, 1, 1)
    found = samples(stack.metrics.render())
    place = 'model="tensorrt_llm",version="1"'
    failures = {
        reason: found[
            f'nv_inference_request_failure{{model="tensorrt_llm",reason="{reason}",version="1"}}'
        ]
        for reason in ("OTHER", "BACKEND", "CANCELED", "REJECTED")
    }
    assert failures == {"OTHER": 0, "BACKEND": 1, "CANCELED": 1, "REJECTED": 0}
    assert found[f"nv_inference_request_success{{{place}}}"] == traffic.successes
    assert found[f"nv_inference_count{{{place}}}"] == traffic.successes
    assert found[f"nv_inference_exec_count{{{place}}}"] == 5
    assert found[f"nv_inference_pending_request_count{{{place}}}"] == 0
    lengths = 'model="tensorrt_llm",response_metric_type="total_{}_tokens",version="1"'
    assert (
        found[f"nv_llm_output_token_len_sum{{{lengths.format('output')}}}"]
        == traffic.tokens
        == 5 + 7 + 4
    )
    assert (
        found[f"nv_llm_output_token_len_count{{{lengths.format('output')}}}"] == traffic.successes
    )
    assert (
        found[f"nv_llm_input_token_len_sum{{{lengths.format('input')}}}"]
        == len(PROMPT) * traffic.successes
    )
    assert found[f"slipstream_request_seconds_count{{{place}}}"] == traffic.successes
    assert (
        found[f"slipstream_time_to_first_token_seconds_count{{{place}}}"]
        == traffic.successes + traffic.cancelled
    )
    assert (
        found[f"nv_inference_first_response_histogram_ms_count{{{place}}}"]
        == traffic.successes + traffic.cancelled
    )
    assert found[f"slipstream_prompt_tokens_total{{{place}}}"] == traffic.prompt_tokens
    assert found[f"slipstream_requests_finished_total{{{place}}}"] == 4
    assert found[f"slipstream_requests_cancelled_total{{{place}}}"] == traffic.cancelled
    assert found[f"slipstream_output_tokens_total{{{place}}}"] >= traffic.tokens + 1
    assert found[f"slipstream_queue_seconds_count{{{place}}}"] == 4


class Replay:
    """Replays a trace of concurrent requests and counts the responses."""

    def __init__(self, stack, seed):
        chance = random.Random(seed)
        self._stack = stack
        self._arrivals = []  # (time, prompt, number of tokens, outcome)
        for _ in range(40):
            prompt = [chance.randrange(2, 90) for _ in range(chance.randrange(1, 60))]
            fate = chance.choices(("stream", "once", "error", "leave"), (5, 3, 1, 1))[0]
            self._arrivals.append((chance.uniform(0, 0.3), prompt, chance.randrange(1, 12), fate))
        self.counts = Counter()

    async def run(self):
        await asyncio.gather(*(self._one(*arrival) for arrival in self._arrivals))
        await until(
            lambda: self._stack.engine.outstanding == 0 and self._stack.engine.stats.running == 0
        )

    async def _one(self, moment, prompt, count, fate):
        await asyncio.sleep(moment)
        if fate == "leave":
            return await self._leave(prompt)
        wanted = 0 if fate == "error" else count
        answers = await ask(
            self._stack.client,
            request("tensorrt_llm", token_inputs(prompt, wanted, fate == "stream")),
        )
        if fate == "error":
            assert [result for result, _ in answers] == [None]
            self.counts["errors"] += 1
            return None
        ids = [
            token
            for result, _ in answers
            for token in result.as_numpy("output_ids").ravel().tolist()
        ]
        self.counts += Counter(successes=1, tokens=len(ids), prompt_tokens=len(prompt))
        return None

    async def _leave(self, prompt):
        async def sending():
            yield request("tensorrt_llm", token_inputs(prompt, 180))

        answers = self._stack.client.stream_infer(sending())
        await anext(answers)
        answers.cancel()
        self.counts["cancelled"] += 1


async def test_metrics_of_a_replayed_trace_equal_the_counts_of_the_client(stack):
    replay = Replay(stack, seed=5)
    await replay.run()
    counts = replay.counts
    assert counts["successes"] + counts["errors"] + counts["cancelled"] == 40
    assert min(counts.values()) > 0
    await until(lambda: stack.engine.stats.finished == counts["successes"] + counts["cancelled"])
    found = samples(stack.metrics.render())
    place = 'model="tensorrt_llm",version="1"'
    assert found[f"nv_inference_request_success{{{place}}}"] == counts["successes"]
    for reason, count in (("BACKEND", counts["errors"]), ("CANCELED", counts["cancelled"])):
        labels = f'model="tensorrt_llm",reason="{reason}",version="1"'
        assert found[f"nv_inference_request_failure{{{labels}}}"] == count
    for side, total in (("input", counts["prompt_tokens"]), ("output", counts["tokens"])):
        labels = f'model="tensorrt_llm",response_metric_type="total_{side}_tokens",version="1"'
        assert found[f"nv_llm_{side}_token_len_sum{{{labels}}}"] == total
        assert found[f"nv_llm_{side}_token_len_count{{{labels}}}"] == counts["successes"]
    assert found[f"slipstream_request_seconds_count{{{place}}}"] == counts["successes"]
    assert found[f"slipstream_requests_cancelled_total{{{place}}}"] == counts["cancelled"]
    assert found[f"nv_inference_pending_request_count{{{place}}}"] == 0
    assert found[f"slipstream_requests_running{{{place}}}"] == 0


async def test_blocks_of_a_repeated_prompt_count_as_reused(stack):
    for _ in range(2):
        await ask(stack.client, request("tensorrt_llm", token_inputs(PROMPT, 2)))
    await until(lambda: stack.engine.stats.finished == 2)
    found = samples(stack.metrics.render())
    place = 'model="tensorrt_llm",version="1"'
    blocks = (len(PROMPT) - 1) // stack.engine.info.block_tokens
    assert found[f"slipstream_kv_blocks_reused_total{{{place}}}"] == blocks > 0
    cached = blocks * stack.engine.info.block_tokens
    assert found[f"slipstream_prompt_tokens_cached_total{{{place}}}"] == cached
    assert found[f"slipstream_kv_cache_hit_rate{{{place}}}"] == pytest.approx(
        cached / (2 * len(PROMPT))
    )


async def test_requests_of_an_ensemble_count_for_its_steps_too(stack):
    for prompt in ("3 4 5", "6 7"):
        answers = await ask(stack.client, request("ensemble", text_inputs(prompt, 3)))
        assert answers[-1][0].get_response().parameters["triton_final_response"].bool_param
    statistics = await stack.client.get_inference_statistics(as_json=True)
    found = {entry["name"]: entry for entry in statistics["model_stats"]}
    for name in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing"):
        assert found[name]["inference_stats"]["success"]["count"] == "2", name
        assert (found[name]["inference_count"], found[name]["execution_count"]) == ("2", "2")
    assert found["chat"]["inference_stats"]["success"] == {}
    only = await stack.client.get_inference_statistics("tensorrt_llm", as_json=True)
    assert [entry["name"] for entry in only["model_stats"]] == ["tensorrt_llm"]
    with pytest.raises(InferenceServerException, match="requested model 'nope' is not available"):
        await stack.client.get_inference_statistics("nope")
    with pytest.raises(
        InferenceServerException, match="requested model version is not available for model 'chat'"
    ):
        await stack.client.get_inference_statistics("chat", "9")


def dashboard_names():
    document = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [
        target["expr"] for panel in document["panels"] for target in panel.get("targets", [])
    ]
    variables = [json.dumps(variable["query"]) for variable in document["templating"]["list"]]
    return {
        name
        for text in expressions + variables
        for name in re.findall(r"\b(?:nv|slipstream)_\w+", text)
    }


async def test_every_metric_of_the_dashboard_exists_after_traffic(stack):
    await Traffic().run(stack)
    await ask(stack.client, request("ensemble", text_inputs("3 4 5", 3)))
    known = {name.partition("{")[0] for name in samples(stack.metrics.render())}
    names = dashboard_names()
    assert len(names) > 30
    assert names - known == set()


def selected(selector, variables, exposition):
    """Return the samples that a selector of the dashboard finds with these variables."""
    name, _, matchers = selector.partition("{")
    found = [labels for sample, labels in exposition if sample == name]
    for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers):
        wanted = variables.get(value, value)
        found = [labels for labels in found if (labels.get(label) == wanted) != (operator == "!=")]
    return found


async def test_the_dashboards_filter_finds_the_series_of_every_model_that_generates(stack):
    for model in ("ensemble", "chat"):
        await ask(stack.client, request(model, text_inputs("3 4 5", 3)))
    exposition = [
        (name.partition("{")[0], dict(re.findall(r'(\w+)="([^"]*)"', name)))
        for name in samples(stack.metrics.render())
    ]
    per_machine = ("nv_cpu_", "nv_gpu_", "nv_energy_", "nv_pinned_memory_")
    for name, labels in exposition:
        assert ("model" in labels) != name.startswith(per_machine), name
    selectors = dashboard_selectors()
    assert len(selectors) > 30
    engines = {
        labels["model"]: labels["engine"]
        for name, labels in exposition
        if name == "slipstream_model_info"
    }
    assert engines == dict.fromkeys(("ensemble", "chat", "tensorrt_llm"), "tensorrt_llm")
    for model, engine in engines.items():
        variables = {"$model": model, "$engine": engine}
        empty = [one for one in selectors if not selected(one, variables, exposition)]
        assert empty == [], model


def dashboard_selectors():
    """Return the selectors of all queries that the dashboard filters by model."""
    document = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [
        target["expr"] for panel in document["panels"] for target in panel.get("targets", [])
    ]
    found = {one for text in expressions for one in re.findall(r"\w+\{[^}]*\}", text)}
    assert all("$model" in one or "$engine" in one for one in found)
    return sorted(found)


async def test_the_dashboard_shows_every_slipstream_metric(stack):
    await Traffic().run(stack)
    ours = {
        name.partition("{")[0]
        for name in samples(stack.metrics.render())
        if name.startswith("slipstream_")
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in dashboard_names()}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours} - shown == set()


def test_gpu_metrics_are_read_from_the_driver():
    found = samples("".join(family.render() for family in Gpus(Driver()).families()))
    assert found['nv_gpu_utilization{gpu_uuid="GPU-2"}'] == 0.5
    assert found['nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}'] == 100
    assert found['nv_gpu_power_usage{gpu_uuid="GPU-1"}'] == 70.5
    assert 'nv_gpu_power_limit{gpu_uuid="GPU-2"}' not in found
    # joules since the first of three readings
    assert found['nv_energy_consumption{gpu_uuid="GPU-1"}'] == 2.0


def test_without_gpus_there_are_no_gpu_metrics():
    class NoGpus(Driver):
        def nvmlDeviceGetCount_v2(self, count):
            return 9

    assert list(Gpus(NoGpus()).families()) == []
