"""A server of several processes: they share the ports, the engines and all that is counted."""

import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import numpy as np
import openai
import pytest
from front_ends import (
    FLAGS,
    FRONT_ENDS,
    GENERATE,
    body,
    front_ends,
    grpc_clients,
    grpc_input,
    http_clients,
    open_stream,
    secondaries,
    token_inputs,
    write_models,
)
from tiny_server import (
    MODEL,
    TRITONSERVER,
    TinyServer,
    children_of,
    is_running,
    make_repository,
    wait_for,
)


class Served:
    """A server, with a connection to each of its processes over gRPC."""

    def __init__(self, folder):
        self.server = TinyServer(
            write_models(folder), folder / "tmp", *FLAGS, program=TRITONSERVER
        ).wait_started()
        self.process = self.server.process.pid
        port = self.server.ports["GRPCInferenceService"]
        self.grpc = list(grpc_clients(self.process, port).values())

    def http_clients(self) -> list[httpx.Client]:
        """Return a client for each process, with one connection to it."""
        return list(http_clients(self.process, self.server.ports["HTTPService"]).values())

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the metrics port: the sum of its rows with these labels."""
        port = self.server.ports["Metrics Service"]
        return read_metric(httpx.get(f"http://127.0.0.1:{port}/metrics").text, name, **labels)

    def sent_by(self) -> list[float]:
        """Return how many requests each front end has sent to the engine."""
        return [
            self.metric("slipstream_frontend_requests_total", frontend=str(index))
            for index in range(FRONT_ENDS)
        ]

    def close(self):
        for client in self.grpc:
            client.close()
        self.server.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A server that tests share. None of them may leave it changed."""
    found = Served(tmp_path_factory.mktemp("served"))
    yield found
    found.close()


@pytest.fixture
def clients(served) -> Iterator[list[httpx.Client]]:
    found = served.http_clients()
    yield found
    for client in found:
        client.close()


@pytest.fixture
def start(tmp_path):
    servers = []

    def launch(*options):
        server = TinyServer(make_repository(tmp_path), tmp_path / "tmp", *options)
        servers.append(server)
        return server

    yield launch
    for server in servers:
        server.close()


def read_metric(text: str, name: str, **labels: str) -> float:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and all(label in line for label in wanted)
    )


def counting(first: int, count: int) -> str:
    return " ".join(str(number) for number in range(first, first + count))


class Stream(threading.Thread):
    """A client of generate_stream over a connection of its own to one process."""

    def __init__(self, client: httpx.Client, max_tokens: int, milliseconds: int = 5):
        super().__init__(daemon=True)
        self._client = client
        self._body = body("5", max_tokens, milliseconds) | {"stream": True}
        self.events: list[dict] = []
        self.cut = False  # whether the connection ended before the answer
        self.start()

    def run(self):
        path = f"{GENERATE}_stream"
        try:
            with self._client.stream("POST", path, json=self._body) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(json.loads(line.removeprefix("data:")))
        except (httpx.RemoteProtocolError, httpx.ReadError):
            self.cut = True

    @property
    def text(self) -> str:
        return "".join(event.get("text_output", "") for event in self.events)

    def wait_begun(self):
        wait_for(lambda: self.events)
        return self

    def finish(self):
        self.join(60)
        assert not self.is_alive()
        return self


def stream_tokens(client, inputs, **settings) -> list[int]:
    """Return the tokens of a request over gRPC."""
    with open_stream(client) as results:
        client.async_stream_infer("tensorrt_llm", inputs, **settings)
        return read_tokens(results)


def read_tokens(results: queue.Queue) -> list[int]:
    tokens: list[int] = []
    while True:
        result, error = results.get(timeout=30)
        assert error is None
        ids = result.as_numpy("output_ids")
        if ids is not None:
            tokens += ids.flatten().tolist()
        if result.get_response().parameters["triton_final_response"].bool_param:
            return tokens


# -- requests


def test_every_process_answers_all_protocols_itself_and_alike(served, clients):
    before = served.sent_by()
    others = served.http_clients()  # OpenAI's SDK closes the connection of a stream
    for client, other, grpc_client in zip(clients, others, served.grpc, strict=True):
        assert client.post(GENERATE, json=body()).json()["text_output"] == "6 7 8"
        sdk = openai.OpenAI(base_url=f"{other.base_url}/v1", api_key="-", http_client=other)
        chunks = sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "5"}],
            max_tokens=3,
            stream=True,
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "6 7 8"
        asked = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "5"}]}
        answer = client.post("/v1/messages", json=asked).json()
        assert answer["content"][0]["text"] == "6 7 8"
        query = [
            grpc_input("QUERY", np.array([[b"5 7"]], object)),
            grpc_input("REQUEST_OUTPUT_LEN", np.array([[3]], np.int32)),
        ]
        ids = grpc_client.infer("preprocessing", query).as_numpy("INPUT_ID")
        assert ids.tolist() == [[5, 7]]
        streaming = token_inputs([5], 3, streaming=np.array([[True]]))
        assert stream_tokens(grpc_client, streaming) == [6, 7, 8]
    added = [after - former for after, former in zip(served.sent_by(), before, strict=True)]
    assert added == [4.0] * FRONT_ENDS  # none was forwarded


def test_a_stream_that_is_behind_gets_several_tokens_at_once_and_the_same_text(served, clients):
    first, second, _ = clients
    stream = Stream(second, 200).wait_begun()
    process = front_ends(served.process)[1]
    signal_process(process, signal.SIGSTOP)
    try:
        # each step makes a token for both, so 20 wait for the process that is stopped
        assert first.post(GENERATE, json=body(max_tokens=20)).status_code == 200
    finally:
        signal_process(process, signal.SIGCONT)
    assert stream.finish().text == counting(6, 200)
    assert len(stream.events) <= 181


def test_streams_of_any_pace_report_the_same_tokens(served, clients):
    """The engine takes no time, so tokens may arrive faster than they can be sent one by one."""
    sent = {
        "model": MODEL,
        "prompt": "5",
        "max_tokens": 700,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for client in clients:
        lines = client.post("/v1/completions", json=sent).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        texts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(texts) == counting(6, 700)
        assert events[-1]["usage"]["completion_tokens"] == 700


def test_stored_responses_are_found_by_every_process(served, clients):
    ids = []
    for client in clients:
        sent = {"model": MODEL, "input": "5", "max_output_tokens": 3}
        ids.append(client.post("/v1/responses", json=sent).json()["id"])
    for client in clients:
        for response_id in ids:
            found = client.get(f"/v1/responses/{response_id}").json()
            assert found["output"][0]["content"][0]["text"] == "6 7 8"


def test_a_python_model_and_its_cache_are_the_same_at_every_process(served, clients):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["one truth"]}
    before = clients[0].get("/v2/models/upper/stats").json()
    for client in clients:
        answer = client.post("/v2/models/upper/infer", json={"inputs": [tensor]}).json()
        assert answer["outputs"][0]["data"] == ["one truth"]
    after = clients[0].get("/v2/models/upper/stats").json()

    def added(*path: str) -> int:
        counts = []
        for found in (before, after):
            value = found["model_stats"][0]
            for name in path:
                value = value[name]
            counts.append(value)
        return counts[1] - counts[0]

    assert added("inference_count") == 1
    assert added("inference_stats", "cache_hit", "count") == FRONT_ENDS - 1


def test_errors_are_the_same_at_every_process(served, clients):
    def ask(client: httpx.Client) -> list[tuple[int, str]]:
        answers = [
            client.post(GENERATE, content=b"{"),
            client.post(GENERATE, json=body(max_tokens=-1)),
            client.post("/v2/models/none/generate", json=body()),
            client.post(f"/v2/models/{MODEL}/versions/7/generate", json=body()),
            client.post("/v1/chat/completions", json={"model": "none", "messages": []}),
            client.get(GENERATE),
            client.get("/none"),
        ]
        return [(answer.status_code, answer.text) for answer in answers]

    first, *others = [ask(client) for client in clients]
    assert [status for status, _ in first] == [500, 400, 404, 404, 404, 405, 404]
    assert others == [first] * (FRONT_ENDS - 1)


def test_no_forwarded_request_is_lost(served, clients):
    """The primary process answers these. It may answer before it has read all of a request."""
    for client, grpc_client in zip(clients, served.grpc, strict=True):
        for _ in range(100):
            assert grpc_client.is_server_ready()
        for size in (0, 100, 100_000, 3_000_000) * 3:
            assert client.post("/v2/none", content=b"x" * size).status_code == 404


# -- one truth


def test_statistics_and_metrics_count_the_requests_of_all_processes(served, clients):
    def read() -> list[int]:
        found = clients[-1].get(f"/v2/models/{MODEL}/stats").json()["model_stats"][0]
        on_http = clients[1].get("/metrics").text
        return [
            found["inference_count"],
            found["inference_stats"]["success"]["count"],
            found["inference_stats"]["fail"]["count"],
            served.metric("nv_inference_request_success", model=MODEL),
            read_metric(on_http, "nv_inference_request_success", model=MODEL),
            read_metric(on_http, "slipstream_inter_token_latency_seconds_count", model=MODEL),
        ]

    before = read()
    for number, client in enumerate(clients, 1):
        for _ in range(number):
            assert client.post(GENERATE, json=body()).status_code == 200
        assert client.post(GENERATE, json=body(max_tokens=-1)).status_code == 400
    done = 1 + 2 + 3
    added = [after - former for after, former in zip(read(), before, strict=True)]
    assert added[:5] == [done, done, FRONT_ENDS, done, done]
    statistics = served.grpc[-1].get_inference_statistics(MODEL).model_stats[0]
    assert statistics.inference_count == before[0] + done


def test_the_queue_limit_holds_for_all_processes_together(served, clients):
    """The engine has 64 rows, and its model a queue of two."""
    first, second, third = clients

    def begin(client: httpx.Client, path: str, sent: dict) -> None:
        response = running.enter_context(client.stream("POST", path, json=sent | {"stream": True}))
        lines = response.iter_lines()
        assert next(lines)
        kept.append(lines)  # the connection is closed with its iterator

    kept: list[Iterator[str]] = []
    long = body(max_tokens=3000, milliseconds=20)
    with ExitStack() as running:
        begin(second, f"{GENERATE}_stream", long)  # it makes the steps slow
        begin(
            first, "/v1/completions", {"model": MODEL, "prompt": "5", "max_tokens": 3000, "n": 63}
        )
        for client in (first, second):
            begin(client, f"{GENERATE}_stream", long)
        refused = third.post(GENERATE, json=body())
        assert refused.status_code == 503
        assert "Exceeds maximum queue size" in refused.text
    wait_for(lambda: third.post(GENERATE, json=body()).status_code == 200)


@pytest.mark.parametrize("stopper", [0, 2])
def test_a_stop_request_reaches_the_process_of_its_request(served, stopper):
    streaming = token_inputs([5], 4000, 5, streaming=np.array([[True]]))
    with open_stream(served.grpc[1]) as results:
        served.grpc[1].async_stream_infer(
            "tensorrt_llm", streaming, request_id="long", enable_empty_final_response=True
        )
        results.get(timeout=30)
        stopping = token_inputs([5], 1, stop=np.array([[True]]))
        assert stream_tokens(served.grpc[stopper], stopping, request_id="long") == []
        assert len(read_tokens(results)) < 3999


def test_every_process_follows_repository_control(served, clients):
    _, second, third = clients
    streams = [Stream(client, 200).wait_begun() for client in clients]
    assert second.post(f"/v2/repository/models/{MODEL}/unload").status_code == 200
    for client in clients:
        assert client.post(GENERATE, json=body()).status_code == 404
        assert client.get(f"/v2/models/{MODEL}/ready").status_code == 400
    assert third.post(f"/v2/repository/models/{MODEL}/load").status_code == 200
    for client, grpc_client in zip(clients, served.grpc, strict=True):
        assert client.post(GENERATE, json=body()).json()["text_output"] == "6 7 8"
        assert grpc_client.is_model_ready(MODEL)
    assert [stream.finish().text for stream in streams] == [counting(6, 200)] * FRONT_ENDS
    indexes = [client.post("/v2/repository/index").json() for client in clients]
    assert indexes == [indexes[0]] * FRONT_ENDS


def test_a_replaced_engine_finishes_the_streams_of_all_processes(served, clients):
    streams = [Stream(client, 200).wait_begun() for client in clients]
    former = served.server.engine_process()
    control = served.http_clients()[1]
    for action in ("unload", "load"):
        path = f"/v2/repository/models/tensorrt_llm/{action}"
        assert control.post(path).status_code == 200
    for client in served.http_clients():
        assert client.post(GENERATE, json=body()).json()["text_output"] == "6 7 8"
    assert [stream.finish().text for stream in streams] == [counting(6, 200)] * FRONT_ENDS
    wait_for(lambda: not is_running(former))


def test_settings_of_the_log_are_those_of_all_processes(served, clients):
    for client in clients:
        assert client.post("/v2/logging", json={"log_verbose_level": 1}).status_code == 200
        found = [other.get("/v2/logging").json()["log_verbose_level"] for other in clients]
        assert found == [1] * FRONT_ENDS
        assert client.post("/v2/logging", json={"log_verbose_level": 0}).status_code == 200


def test_an_engine_that_dies_fails_the_streams_of_all_processes_and_comes_back(served, clients):
    streams = [Stream(client, 3000).wait_begun() for client in clients]
    signal_process(served.server.engine_process(), signal.SIGKILL)
    for stream in streams:
        last = stream.finish().events[-1]
        log = served.server.lines[-30:]
        assert "the engine process failed: killed by SIGKILL" in last["error"], log
    for client in clients:
        wait_for(lambda client=client: client.post(GENERATE, json=body()).status_code == 200)
    assert clients[0].get("/v2/health/ready").status_code == 200


# -- start and end


def signal_process(process: int, number: signal.Signals) -> None:
    assert process
    os.kill(process, number)


def test_a_drain_finishes_the_streams_of_all_processes_and_leaves_nothing(start):
    server = start("--frontends", "2").wait_started()
    assert "Serving:  with 2 front ends" in server.lines
    processes = children_of(server.process.pid)
    port = server.ports["HTTPService"]
    clients = http_clients(server.process.pid, port).values()
    others = http_clients(server.process.pid, port).values()
    streams = [Stream(client, 300).wait_begun() for client in clients]
    server.process.send_signal(signal.SIGTERM)
    for client in others:
        wait_for(lambda client=client: client.post(GENERATE, json=body()).status_code == 503)
    assert [stream.finish().text for stream in streams] == [counting(6, 300)] * 2
    assert server.wait_exit() == 0
    assert server.remaining_files() == []
    assert [process for process in processes if is_running(process)] == []
    assert len(processes) == 2  # the engine and a front end


def test_a_killed_process_fails_only_its_own_streams_and_is_started_again(start):
    server = start("--frontends", "2", "--http-metrics").wait_started()
    port = server.ports["HTTPService"]
    primary, secondary = front_ends(server.process.pid)
    clients = http_clients(primary, port)
    for client in clients.values():
        assert client.post(GENERATE, json=body()).status_code == 200
    stats = f"/v2/models/{MODEL}/stats"
    assert clients[primary].get(stats).json()["model_stats"][0]["inference_count"] == 2
    whole = Stream(clients[primary], 400).wait_begun()
    cut = Stream(clients[secondary], 3000).wait_begun()
    signal_process(secondary, signal.SIGKILL)
    assert cut.finish().cut
    assert whole.finish().text == counting(6, 400)
    wait_for(lambda: [p for p in secondaries(primary) if p != secondary])
    clients = http_clients(primary, port)
    assert len(clients) == 2
    for client in clients.values():
        assert client.post(GENERATE, json=body()).json()["text_output"] == "6 7 8"
        assert client.get(stats).json()["model_stats"][0]["inference_count"] >= 4
    found = clients[primary].get(stats).json()["model_stats"][0]
    assert found["inference_count"] == 5  # all but the one that was cut
    text = clients[primary].get("/metrics").text
    assert read_metric(text, "nv_inference_pending_request_count", model=MODEL) == 0
    assert "front end 1 ended: killed by SIGKILL" in "\n".join(server.lines)


def is_free(port: int) -> bool:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_the_end_of_the_first_process_is_the_end_of_all(start):
    server = start("--frontends", "2").wait_started()
    processes = children_of(server.process.pid)
    ports = list(server.ports.values())
    signal_process(server.process.pid, signal.SIGKILL)
    wait_for(lambda: not any(is_running(process) for process in processes))
    for port in ports:
        wait_for(lambda port=port: is_free(port))


def test_a_port_of_another_server_is_refused(start):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start("--frontends", "2", "--http-port", str(port))
        assert server.wait_exit() == 1
    assert server.lines[-1].endswith(
        f"cannot use 127.0.0.1:{port}: Address already in use; stop what uses it, or choose "
        "another port with --http-port"
    )


# -- processes that do not respond


@pytest.fixture
def explicit(tmp_path):
    flags = [flag for flag in FLAGS if "frontends" not in flag]
    more = ["--frontends=2", "--exit-timeout-secs=2"]
    server = TinyServer(
        write_models(tmp_path), tmp_path / "tmp", *flags, *more, program=TRITONSERVER
    ).wait_started()
    yield server
    server.close()


@pytest.mark.slow
def test_streams_of_an_unloaded_engine_that_take_too_long_fail_at_every_process(explicit):
    port = explicit.ports["HTTPService"]
    streams = [
        Stream(client, 3000).wait_begun()
        for client in http_clients(explicit.process.pid, port).values()
    ]
    unloaded = httpx.post(f"{explicit.url}/v2/repository/models/tensorrt_llm/unload", timeout=30)
    assert unloaded.status_code == 200
    for stream in streams:
        assert "error" in stream.finish().events[-1]


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced_and_delays_nothing_for_long(explicit):
    port = explicit.ports["HTTPService"]
    primary, stopped = front_ends(explicit.process.pid)
    client = http_clients(primary, port)[primary]
    signal_process(stopped, signal.SIGSTOP)
    assert client.get("/v2/health/ready").status_code == 200
    assert client.post(GENERATE, json=body()).status_code == 200
    assert client.get(f"/v2/models/{MODEL}/stats").status_code == 200
    for action in ("unload", "load"):
        assert client.post(f"/v2/repository/models/{MODEL}/{action}").status_code == 200
    wait_for(lambda: [found for found in secondaries(primary) if found != stopped])
    for found in http_clients(primary, port).values():
        assert found.post(GENERATE, json=body()).status_code == 200
    assert "it sent no message for 20 s and was killed" in "\n".join(explicit.lines)


@pytest.mark.slow
def test_a_drain_does_not_wait_for_a_process_that_hangs(explicit):
    port = explicit.ports["HTTPService"]
    primary, stopped = front_ends(explicit.process.pid)
    stream = Stream(http_clients(primary, port)[primary], 200).wait_begun()
    signal_process(stopped, signal.SIGSTOP)
    explicit.process.send_signal(signal.SIGTERM)
    assert stream.finish().text == counting(6, 200)
    assert explicit.wait_exit() == 0
    assert explicit.remaining_files() == []
    assert not is_running(stopped)
