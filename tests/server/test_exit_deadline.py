"""A server ends in time, also where a part of it does not end by itself."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import grpc
import httpx
import pytest
from tiny_server import HERE, MODEL, TinyServer, is_running, make_repository, wait_for

UNENDING_THREAD = """
import threading
from slipstream.server.exit_deadline import ExitDeadline

deadline = ExitDeadline(lambda: print("killed"))
threading.Thread(target=threading.Event().wait, name="unending").start()
deadline.set(3600, 1)
deadline.part = "engines"
deadline.set(0.05, 7)
"""
# A check of a grammar that does not end, and a script that serves with it.
UNENDING_CHECK = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
import tiny_server
from slipstream.server.text import guides
guides.MAX_COMPILE_SECONDS = 0.1
guides.check_guide = lambda guide: time.sleep(3600)
tiny_server.main()
"""
UNENDING_MODEL = """
import time
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
    def finalize(self):
        time.sleep(3600)
"""
CONFIG = """
name: "unending"
backend: "python"
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
BOUND_SECONDS = 3.0  # with an exit timeout of one second


def test_a_thread_that_does_not_end_does_not_outlast_the_deadline():
    found = subprocess.run(
        [sys.executable, "-c", UNENDING_THREAD], capture_output=True, text=True, timeout=30
    )
    assert (found.returncode, found.stdout) == (7, "killed\n")
    assert "has not ended: the end of engines, unending" in found.stderr


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(**settings):
        repository = make_repository(tmp_path)
        (repository / "unending" / "1").mkdir(parents=True)
        (repository / "unending" / "1" / "model.py").write_text(UNENDING_MODEL)
        (repository / "unending" / "config.pbtxt").write_text(CONFIG)
        options = ("--exit-timeout-secs=1", "--allow-python-models")
        server = TinyServer(repository, tmp_path / "tmp", *options, **settings)
        servers.append(server)
        return server.wait_started()

    yield start
    for server in servers:
        server.close()


def send_unending_check(server):
    kind = {"type": "json_object"}
    body = {"model": MODEL, "prompt": "1", "response_format": kind}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert "to check: make it smaller" in answer.json()["error"]["message"]


def open_unending_call(server):
    """Begin a call that sends no message and does not end, beside a request of its client."""
    held = threading.Event()
    channel = grpc.insecure_channel(f"127.0.0.1:{server.ports['GRPCInferenceService']}")
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    list_answers = call(iter(held.wait, True))
    threading.Thread(target=lambda: suppress_end(list_answers), daemon=True).start()
    return held, channel


def suppress_end(answers):
    with suppress(grpc.RpcError):
        list(answers)


def end_with_everything(serve, tmp_path):
    """End a server with a check, a model, and a call that do not end. Return the seconds."""
    script = tmp_path / "serve.py"
    script.write_text(UNENDING_CHECK)
    server = serve(script=script)
    send_unending_check(server)
    held, channel = open_unending_call(server)
    engine = server.engine_process()
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    seconds = time.monotonic() - begun
    held.set()
    channel.close()
    wait_for(lambda: not is_running(engine))
    assert server.remaining_files() == []
    assert any("models do not end within" in line for line in server.lines)
    return server, seconds


def test_what_does_not_end_does_not_outlast_the_deadline(serve, tmp_path):
    server, _ = end_with_everything(serve, tmp_path)
    assert any("the server ends although this has not ended" in line for line in server.lines)


@pytest.mark.slow
def test_what_does_not_end_holds_the_exit_for_two_seconds_at_most(serve, tmp_path):
    _, seconds = end_with_everything(serve, tmp_path)
    assert seconds < BOUND_SECONDS
