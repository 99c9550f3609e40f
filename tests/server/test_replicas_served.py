"""Servers with several engines of one model: configuration, statistics, front ends, failures."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from front_ends import GENERATE, body, http_clients
from test_frontends import read_metric
from tiny_server import (
    MODEL,
    TRITONSERVER,
    TinyServer,
    children_of,
    command_of,
    make_repository,
    wait_for,
)

ONE = "instance_group [ { count: 1 kind: KIND_CPU } ]"


def write_models(folder, count=2):
    repository = make_repository(folder)
    set_count(repository, count, 1)
    return repository


def set_count(repository, count, before):
    config = repository / "tensorrt_llm" / "config.pbtxt"
    former = ONE.replace("1", str(before))
    assert former in config.read_text()
    config.write_text(config.read_text().replace(former, ONE.replace("1", str(count))))


def engines(server) -> list[int]:
    return [
        found for found in children_of(server.process.pid) if "scripted_engine" in command_of(found)
    ]


def metrics(server) -> str:
    return httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").text


def metric(server, name, **labels) -> float:
    return read_metric(metrics(server), name, **labels)


def running(server) -> list[float]:
    """Return the requests that run in each of two replicas."""
    text = metrics(server)
    name = "slipstream_replica_requests_running"
    return [read_metric(text, name, replica=str(index)) for index in range(2)]


def instances(server) -> list[int]:
    config = httpx.get(f"{server.url}/v2/models/tensorrt_llm/config").json()
    return [group["count"] for group in config["instance_group"]]


@pytest.fixture
def start(tmp_path) -> Iterator:
    servers = []

    def launch(*options, count=1, **more) -> TinyServer:
        repository = write_models(tmp_path, count)
        server = TinyServer(repository, tmp_path / "tmp", *options, **more)
        servers.append(server)
        return server

    yield launch
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[TinyServer]:
    """Two front ends over two replicas."""
    folder = tmp_path_factory.mktemp("served")
    flags = ("--frontends=2", "--model-control-mode=explicit", "--load-model=*")
    server = TinyServer(write_models(folder), folder / "tmp", *flags, program=TRITONSERVER)
    yield server.wait_started()
    server.close()


class Stream(threading.Thread):
    """A stream of numbers that a test can wait for."""

    def __init__(self, client: httpx.Client, first: int, count: int) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._first = first
        self._count = count
        self.events: list[dict] = []
        self.start()

    def run(self) -> None:
        asked = body(str(self._first), self._count, 10) | {"stream": True}
        with self._client.stream("POST", f"{GENERATE}_stream", json=asked) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(json.loads(line.removeprefix("data:")))

    @property
    def failed(self) -> bool:
        return "error" in self.events[-1]


def test_the_configuration_shows_the_instances(served):
    assert instances(served) == [2]
    assert len(engines(served)) == 2


def test_all_front_ends_use_all_replicas_and_every_request_is_counted_once(served):
    clients = list(http_clients(served.process.pid, served.ports["HTTPService"]).values())
    assert len(clients) == 2
    before = metric(served, "slipstream_replica_requests_finished_total")
    requests = metric(served, "nv_inference_request_success", model="tensorrt_llm")
    for number in range(20):
        answer = clients[number % 2].post(GENERATE, json=body(str(number), 3)).json()
        assert answer["text_output"] == f"{number + 1} {number + 2} {number + 3}"
    streams = [Stream(clients[number % 2], number, 200) for number in range(16)]
    wait_for(lambda: metric(served, "slipstream_requests_running") == 16)
    each = running(served)
    assert sum(each) == 16
    assert max(each) - min(each) <= 2  # front ends may choose at the same moment
    used = metric(served, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
    most = metric(served, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    assert (used, most) == (16, 256)
    assert metric(served, "nv_trt_llm_request_metrics", request_type="max") == 128
    share = metric(served, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="fraction")
    assert share == pytest.approx(16 / 256)
    block = metric(served, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per")
    assert block == 32
    for stream in streams:
        stream.join(60)
        assert not stream.failed
    wait_for(lambda: metric(served, "slipstream_requests_finished_total") == before + 36)
    assert metric(served, "slipstream_replica_requests_finished_total") == before + 36
    for index in range(2):
        name = "slipstream_replica_requests_finished_total"
        assert metric(served, name, replica=str(index)) >= 7
    stats = httpx.get(f"{served.url}/v2/models/tensorrt_llm/stats").json()["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] == requests + 36
    for client in clients:
        client.close()


def test_a_killed_replica_loses_its_streams_only_and_every_front_end_stays_ready(served):
    clients = list(http_clients(served.process.pid, served.ports["HTTPService"]).values())
    streams = [Stream(clients[number % 2], number, 250) for number in range(8)]
    wait_for(lambda: metric(served, "slipstream_requests_running") == 8)
    each = running(served)
    victim, kept = engines(served)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: sum(bool(stream.events) and stream.failed for stream in streams) in each)
    for client in clients:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v2/models/tensorrt_llm/ready").status_code == 200
        for number in range(10):
            answer = client.post(GENERATE, json=body(str(number), 2))
            assert answer.json()["text_output"] == f"{number + 1} {number + 2}"
    for stream in streams:
        stream.join(60)
    lost = [stream for stream in streams if stream.failed]
    assert len(lost) in each
    assert {"killed by SIGKILL" in stream.events[-1]["error"] for stream in lost} == {True}
    wait_for(lambda: metric(served, "slipstream_replica_ready") == 2)
    assert kept in engines(served)
    assert victim not in engines(served)
    # both front ends use the new process
    again = [Stream(clients[number % 2], number, 150) for number in range(8)]
    wait_for(lambda: sum(running(served)) == 8)
    assert min(running(served)) >= 3
    for stream in again:
        stream.join(60)
        assert not stream.failed
    for client in clients:
        client.close()


def test_a_reload_changes_the_number_of_replicas_without_refusals(served, tmp_path_factory):
    clients = list(http_clients(served.process.pid, served.ports["HTTPService"]).values())
    config = httpx.get(f"{served.url}/v2/models/tensorrt_llm/config").json()
    finished = metric(served, "slipstream_requests_finished_total")
    streams = [Stream(client, 5, 250) for client in clients]
    wait_for(lambda: metric(served, "slipstream_requests_running") == 2)
    for count in (1, 3, 2):
        config["instance_group"][0]["count"] = count
        load = {"parameters": {"config": json.dumps(config)}}
        url = f"{served.url}/v2/repository/models/tensorrt_llm/load"
        assert httpx.post(url, json=load, timeout=60).status_code == 200
        assert instances(served) == [count]
        for client in clients:
            answer = client.post(GENERATE, json=body("7", 2)).json()
            assert answer["text_output"] == "8 9"
    for stream in streams:
        stream.join(60)
        assert not stream.failed
    wait_for(lambda: len(engines(served)) == 2)
    wait_for(lambda: metric(served, "slipstream_requests_finished_total") == finished + 8)
    for client in clients:
        client.close()


def test_the_flag_overrides_the_configuration(start):
    server = start("--replicas", "3", count=2).wait_started()
    assert len(engines(server)) == 3
    assert instances(server) == [3]
    assert any("tensorrt_llm, each of 3 replicas on cpu" in line for line in server.lines)
    answer = httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=body("5", 2)).json()
    assert answer["text_output"] == "6 7"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert server.remaining_files() == []


def test_one_replica_has_no_metrics_of_replicas(start):
    server = start().wait_started()
    assert "slipstream_replica_" not in metrics(server)


@pytest.mark.parametrize(
    ("value", "program", "text"),
    [
        (
            "0",
            "start",
            "argument --replicas/--data-parallel-size/-dp: must be a whole number of at least 1, not '0'",
        ),
        ("65", "start", "tensorrt_llm: replicas must be 1 to 64, not 65"),
        ("0", TRITONSERVER, "--replicas must be at least 1, not 0"),
        ("65", TRITONSERVER, "tensorrt_llm: replicas must be 1 to 64, not 65"),
    ],
)
def test_a_wrong_number_is_refused(start, value, program, text):
    server = start(f"--replicas={value}", program=program)
    assert server.wait_exit() != 0
    assert any(text in line for line in server.lines), server.lines


def test_gpu_sets_that_do_not_match_the_instances_are_refused_at_the_start(tmp_path):
    repository = write_models(tmp_path, 3)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    key = 'key: "gpu_device_ids" value { string_value: "'
    assert key in config.read_text()
    config.write_text(config.read_text().replace(key, f"{key}0,1;2"))
    line = next(i for i, text in enumerate(config.read_text().splitlines(), 1) if key in text)
    server = TinyServer(repository, tmp_path / "tmp")
    assert server.wait_exit() != 0
    expected = (
        f"{config}:{line}: parameters.gpu_device_ids: '0,1;2' has 2 sets of GPUs, but "
        "instance_group has 3 instances: give one set for each instance"
    )
    assert any(expected in text for text in server.lines), server.lines
