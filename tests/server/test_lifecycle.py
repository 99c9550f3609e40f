"""A whole server as a process: it starts, serves, replaces its engine, drains and stops."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from tiny_server import (
    HERE,
    MODEL,
    ROOT,
    TinyServer,
    children_of,
    is_running,
    make_repository,
    wait_for,
)


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(*options, engine="fine", temporary=tmp_path / "tmp", **settings):
        repository = make_repository(tmp_path / engine, engine)
        server = TinyServer(repository, temporary, *options, **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A server that tests share. They only send requests and read its log."""
    folder = tmp_path_factory.mktemp("steady")
    server = TinyServer(make_repository(folder), folder / "tmp").wait_started()
    yield server
    server.close()


def generate(server, prompt="5", max_tokens=3, milliseconds=0):
    body = {"text_input": prompt, "max_tokens": max_tokens, "random_seed": milliseconds}
    return httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=body, timeout=30)


class Stream(threading.Thread):
    """A client of generate_stream that keeps the events it receives."""

    def __init__(self, server, prompt, max_tokens, milliseconds):
        super().__init__(daemon=True)
        self.url = f"{server.url}/v2/models/{MODEL}/generate_stream"
        self.body = {
            "text_input": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "random_seed": milliseconds,
        }
        self.events = []
        self.cut = False  # whether the connection ended before the answer
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(json.loads(line.removeprefix("data:")))
        except httpx.RemoteProtocolError:
            self.cut = True

    @property
    def text(self):
        return "".join(event.get("text_output", "") for event in self.events)

    def wait_begun(self):
        wait_for(lambda: self.events)
        return self

    def finish(self):
        self.join(60)
        assert not self.is_alive()
        return self


def ready(server):
    return httpx.get(f"{server.url}/v2/health/ready").status_code


def counting(first, count):
    return " ".join(str(number) for number in range(first, first + count))


def test_a_server_starts_answers_and_stops_without_leftovers(serve):
    server = serve().wait_started()
    started = [line for line in server.lines if "] Started " in line]
    assert [line.split("] ")[1].split(" at ")[0] for line in started] == [
        "Started GRPCInferenceService",
        "Started HTTPService",
        "Started Metrics Service",
    ]
    for line in started:
        socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2]))).close()
    assert ready(server) == 200
    assert generate(server).json()["text_output"] == "6 7 8"
    metrics = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").text
    assert f'nv_inference_request_success{{model="{MODEL}",version="1"}} 1' in metrics
    assert '{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 128' in metrics
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert server.remaining_files() == []


def test_the_printed_curl_command_works(steady):
    command = next(line for line in steady.lines if "curl" in line).partition("curl")[2]
    found = subprocess.run(f"curl{command}", shell=True, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout).get("model_name") == MODEL, found.stdout
    assert any("/docs" in line and "/metrics" in line for line in steady.lines)


def test_the_start_time_is_printed(steady):
    reported = next(line for line in steady.lines if line.startswith("Ready:"))
    whole, _, phases = reported.removeprefix("Ready:    in ").partition(" s: ")
    named = {name: float(seconds) for name, seconds in re.findall(r"([a-z ]+) ([\d.]+) s", phases)}
    assert list(map(str.strip, named))[:2] == ["program", "engine process"]
    assert float(whole) == pytest.approx(sum(named.values()), abs=0.25)


def test_sigterm_lets_every_admitted_stream_finish_and_refuses_new_work(serve):
    server = serve().wait_started()
    streams = [Stream(server, str(start), 100, 10).wait_begun() for start in range(0, 80, 10)]
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: ready(server) == 400)
    refused = generate(server)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "shutting down" in refused.json()["error"]
    for start, stream in zip(range(0, 80, 10), streams, strict=True):
        assert stream.finish().text.split() == counting(start + 1, 100).split()
        assert not stream.cut
    assert server.wait_exit() == 0
    assert server.remaining_files() == []


def test_streams_that_exceed_the_exit_timeout_are_cancelled(serve):
    server = serve("--exit-timeout-secs", "0.5").wait_started()
    stream = Stream(server, "1", 2000, 20).wait_begun()
    server.process.send_signal(signal.SIGINT)
    assert stream.finish().events[-1] == {"error": "the server is shutting down"}
    assert server.wait_exit() == 0


def test_connections_that_never_end_do_not_outlast_the_exit_timeout(serve):
    server = serve("--exit-timeout-secs", "0.5", close_seconds=3600).wait_started()
    with socket.create_connection(("127.0.0.1", server.ports["HTTPService"])) as half:
        head = f"POST /v2/models/{MODEL}/generate HTTP/1.1\r\nHost: h\r\nContent-Length: 90\r\n\r\n"
        half.sendall(head.encode() + b"{")
        assert ready(server) == 200  # the request has arrived
        os.kill(server.engine_process(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0  # it waits for 30 s


def test_a_second_signal_ends_the_server_at_once(serve):
    server = serve().wait_started()
    engine = server.engine_process()
    stream = Stream(server, "1", 2000, 20).wait_begun()
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: ready(server) == 400)
    assert stream.is_alive()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 128 + signal.SIGTERM
    assert stream.finish().cut
    assert not is_running(engine)
    assert server.remaining_files() == []


def test_killing_the_server_ends_the_engine(serve):
    server = serve().wait_started()
    engine = server.engine_process()
    assert is_running(engine)
    server.process.kill()
    wait_for(lambda: not is_running(engine))
    # the file of the socket is removed once both ends are connected
    assert server.remaining_files() == []


@pytest.fixture
def short_folder():
    """A path that is short enough for sockets, also in a process of several."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


def test_files_of_a_server_killed_while_loading_are_removed_by_the_next_one(serve, short_folder):
    loading = serve(engine="slow", temporary=short_folder)
    wait_for(loading.engine_process)
    # removes nothing of a server that runs
    other = serve(engine="fine-too", temporary=short_folder).wait_started()
    assert loading.remaining_files() != []
    loading.process.kill()
    loading.wait_exit()
    assert loading.remaining_files() != []
    other.close()
    serve(engine="fine", temporary=short_folder).wait_started()
    assert loading.remaining_files() == []


def test_a_killed_engine_fails_its_streams_with_the_reason_and_is_restarted(serve):
    server = serve().wait_started()
    stream = Stream(server, "1", 2000, 20).wait_begun()
    first = server.engine_process()
    os.kill(first, signal.SIGKILL)
    assert "killed by SIGKILL" in stream.finish().events[-1]["error"]
    wait_for(lambda: ready(server) == 200)
    assert generate(server).json()["text_output"] == "6 7 8"
    assert server.engine_process() != first
    assert sum("the engine serves again, after " in line for line in server.lines) == 1


def test_an_engine_that_keeps_dying_ends_the_server_with_a_failure(serve):
    server = serve().wait_started()
    for _ in range(4):
        wait_for(lambda: ready(server) == 200 or server.process.poll() is not None)
        assert "SIGKILL" in generate(server, "902").text
    assert server.wait_exit() == 1
    assert server.lines[-1].startswith(
        "error: the engine failed for good: it died more than 3 times in 10 minutes"
    )
    assert server.remaining_files() == []


def test_an_engine_that_hangs_is_replaced(serve):
    server = serve("--watchdog-secs", "1").wait_started()
    lost = generate(server, "901")
    # the request did not cause the failure
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert "sent no message for 1 s" in lost.text
    wait_for(lambda: ready(server) == 200)
    assert generate(server).json()["text_output"] == "6 7 8"


def test_a_port_in_use_is_reported_before_anything_is_loaded(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve("--http-port", str(port))
        assert server.wait_exit() == 1
    assert f"cannot use 127.0.0.1:{port}" in server.lines[-1]
    assert "--http-port" in server.lines[-1]
    assert not any("engine" in line for line in server.lines[:-1])


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port", "--metrics-port"])
def test_an_invalid_port_is_reported_in_one_line(serve, option):
    server = serve(option, "65536")
    assert server.wait_exit() == 1
    assert server.lines == [f"error: {option} must be 0 to 65535, got 65536"]


def test_a_missing_repository_is_reported_in_the_last_line(tmp_path):
    server = TinyServer(tmp_path / "nowhere", tmp_path / "tmp")
    assert server.wait_exit() == 1
    assert str(tmp_path / "nowhere") in server.lines[-1]
    assert server.lines[-1].startswith("error: cannot serve the model repository")


def test_an_engine_that_cannot_start_is_reported_in_the_last_line(serve):
    server = serve(engine="bad")
    assert server.wait_exit() == 1
    assert (
        server.lines[-1]
        == "error: the engine did not start: ValueError: this engine folder is bad by order"
    )
    assert server.remaining_files() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_engine_loads_ends_the_server_with_a_line(serve, number, code):
    server = serve(engine="slow")
    wait_for(lambda: server.engine_process())
    engine = server.engine_process()
    server.process.send_signal(number)
    assert server.wait_exit() == code
    assert server.lines[-1].endswith(f"{number.name} before the server was ready: it ends")
    assert not is_running(engine)
    assert server.remaining_files() == []


def test_the_server_process_never_loads_torch(steady):
    generate(steady)
    assert "libtorch" not in Path(f"/proc/{steady.process.pid}/maps").read_text()
    assert children_of(steady.process.pid) == [steady.engine_process()]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_infer_prints_the_text_of_a_running_server(steady, protocol):
    port = steady.ports["HTTPService" if protocol == "http" else "GRPCInferenceService"]
    command = [
        sys.executable,
        str(HERE / "tiny_server.py"),
        "infer",
        "-m",
        MODEL,
        "--prompt",
        "7",
        "-i",
        protocol,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = ["-u", "127.0.0.1", "-p", str(port), "--max-tokens", "4"]
    found = subprocess.run(
        command + arguments, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "8 9 10 11\n", "")
