"""The routes that the dashboard of the page reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_support import RunningServer, get, wait_until
from openai_server import Serving
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.messages import EngineStats, StepRecord
from slipstream.server.engine_link.link import decode_from_engine, encode
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.metrics.server_metrics import ServerMetrics
from slipstream.server.services import create_app, create_context


def steps(port: int, query: str = "") -> list[list[Any]]:
    (engine,) = json.loads(get(port, f"/dashboard/steps{query}").body)["engines"]
    assert (engine["model"], engine["version"], engine["replica"]) == ("tensorrt_llm", "1", 0)
    return engine["steps"]


def test_the_steps_of_a_request_are_its_prompt_and_one_for_each_token(serving: Serving) -> None:
    before = steps(serving.port)
    after = f"?after={before[-1][0]}" if before else ""
    answer = serving.client.completions.create(
        model="ensemble", prompt=[5, 6, 7, 8, 9], max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 4
    wait_until(lambda: len(steps(serving.port, after)) == 4)
    started, rows, epochs, counts, samples = zip(*steps(serving.port, after), strict=True)
    assert list(started) == sorted(started)
    assert counts == ([5], [1], [1], [1])
    assert samples == ([True],) * 4
    assert len(set(map(str, rows))) == len(set(map(str, epochs))) == 1, "a request keeps its row"
    assert steps(serving.port, f"?after={started[1]}") == steps(serving.port, after)[2:]


@pytest.mark.parametrize("after", ["x", "-1", "9" * 30])
def test_a_wrong_time_is_refused(serving: Serving, after: str) -> None:
    answer = get(serving.port, f"/dashboard/steps?after={after}")
    assert (answer.status, json.loads(answer.body)["error"]) == (
        400,
        "after must be a time in microseconds since 1970",
    )


def test_the_metrics_are_those_of_the_metrics_port(serving: Serving) -> None:
    serving.client.completions.create(model="ensemble", prompt="a", max_tokens=2)
    text = get(serving.port, "/dashboard/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "slipstream_requests_running",
        "slipstream_requests_waiting",
        "slipstream_output_tokens",
        "slipstream_prompt_tokens",
        "slipstream_prompt_tokens_cached",
        "slipstream_requests_finished",
        "slipstream_kv_blocks_used",
        "slipstream_kv_blocks_free",
        "slipstream_kv_blocks_cached",
        "slipstream_time_to_first_token_seconds",
        "slipstream_inter_token_latency_seconds",
        "slipstream_queue_seconds",
    ):
        assert "tensorrt_llm" in {one.labels["model"] for one in families[name].samples}, name


def test_both_need_the_key_of_the_server() -> None:
    context = create_context(access=Access(api_key="user-key"))
    app = create_app(ModelRegistry(), ServerState([]), context, dashboard=ServerMetrics())
    with RunningServer(app) as server:
        for path in ("/dashboard/metrics", "/dashboard/steps"):
            assert get(server.port, path).status == 401


def test_the_statistics_carry_the_steps_of_one_process() -> None:
    records = [StepRecord(time, [0], [time], [1], [True]) for time in range(3)]
    stats = EngineStats(recent_steps=records)
    assert decode_from_engine(encode(stats)) == stats
    assert EngineStats.of_replicas([stats, stats]).recent_steps == []
