"""`--log-format json`: everything that a server's processes print is one JSON object per line."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import MODEL, ROOT, TinyServer, make_repository, wait_for

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.log_settings import log_settings, update_log_settings
from slipstream.server.log.capture import Relay
from slipstream.server.log.formats import (
    JsonFormatter,
    RelayFormatter,
    make_record,
    read_relayed,
)
from slipstream.server.log.output import HANDLER, configure_log
from slipstream.server.metrics.statistics import ModelCounters

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
PROMPT = "a prompt that no log may hold"
NOISY = """
import sys, warnings
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        print("printed by the model")
        warnings.warn("warned by the model")
        pb_utils.Logger.log_error("logged by the model")
    def execute(self, requests):
        sys.stderr.write("printed without an end")
        raise RuntimeError("raised by the model")
"""


def noisy_repository(folder: Path) -> Path:
    repository = make_repository(folder)
    (repository / "noisy" / "1").mkdir(parents=True)
    (repository / "noisy" / "1" / "model.py").write_text(NOISY)
    (repository / "noisy" / "config.pbtxt").write_text(
        'name: "noisy"\nbackend: "python"\ninput [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        'output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
    )
    return repository


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    """Return the objects of all lines after checking the fields that each must have."""
    objects = [json.loads(line) for line in lines]
    for line in objects:
        assert TIME.fullmatch(line["time"])
        assert line["level"] in ("info", "warning", "error", "debug")
        assert isinstance(line["message"], str)
        assert line["process"] > 0
        assert set(line) <= {
            "time",
            "level",
            "message",
            "model",
            "request_id",
            "error",
            "process",
            "place",
        }
    return objects


def find_line(objects: list[dict[str, Any]], words: str) -> dict[str, Any]:
    (found,) = [line for line in objects if words in line["message"]]
    return found


class ServerRun:
    """Runs a server from start to exit, makes everything fail, and collects its output."""

    def __init__(self, folder: Path) -> None:
        server = TinyServer(
            noisy_repository(folder), folder / "tmp", "--allow-python-models", "--log-format=json"
        )
        try:
            server.wait_started()
            self.settings = httpx.get(f"{server.url}/v2/logging").json()
            self._fail_requests(server)
            wait_for(lambda: sum("serves again" in line for line in server.lines) == 1)
            for number, times in ((signal.SIGSEGV, 2), (signal.SIGKILL, 3)):
                os.kill(server.engine_process(), number)
                wait_for(
                    lambda times=times: (
                        sum("serves again" in line for line in server.lines) == times
                    )
                )
            with socket.create_connection(("127.0.0.1", server.ports["HTTPService"])) as client:
                client.sendall(b"this is no HTTP\r\n\r\n")
                assert client.recv(1) == b""
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
        finally:
            server.close()
        self.text = "\n".join(server.lines)
        self.server_process = server.process.pid
        self.objects = parsed(server.lines)

    def _fail_requests(self, server: TinyServer) -> None:
        tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}
        body = {"id": "seven", "inputs": [tensor]}
        assert (
            "raised by the model"
            in httpx.post(f"{server.url}/v2/models/noisy/infer", json=body).text
        )
        raising = {"text_input": "900", "max_tokens": 3}
        assert (
            "raised by order"
            in httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=raising).text
        )


@pytest.fixture(scope="module")
def server_run(tmp_path_factory: pytest.TempPathFactory) -> ServerRun:
    return ServerRun(tmp_path_factory.mktemp("server_run"))


def test_services_and_loaded_models_are_logged(server_run: ServerRun) -> None:
    for service in ("GRPCInferenceService", "HTTPService", "Metrics Service"):
        line = find_line(server_run.objects, f"Started {service} at ")
        assert (line["level"], line["process"]) == ("info", server_run.server_process)
    assert find_line(server_run.objects, "successfully loaded 'noisy'")["model"] == "noisy"
    assert find_line(server_run.objects, "loaded in 0.0 s")["model"] == "tensorrt_llm"
    banner = find_line(server_run.objects, "API docs")["message"].splitlines()
    address = find_line(server_run.objects, "Started HTTPService at ")["message"].rpartition(" ")[2]
    assert [line.partition(":")[0] for line in banner] == ["Ready", "Try it", "OpenAI", "API docs"]
    assert (
        banner[2]
        == f"OpenAI:   http://{address}/v1   chat: http://{address}/ or slipstream chat -u {address}"
    )
    assert find_line(server_run.objects, "Invalid HTTP request")["level"] == "warning"
    assert server_run.settings["log_format"] == "json"


def test_output_of_a_python_model_is_logged_with_its_name(server_run: ServerRun) -> None:
    for words, level in (
        ("printed by the model", "info"),
        ("warned by the model", "warning"),
        ("logged by the model", "error"),
        ("printed without an end", "info"),
    ):
        line = find_line(server_run.objects, words)
        assert (line["level"], line["model"]) == (level, "noisy")
    failed = find_line(server_run.objects, "execute failed")
    assert (failed["level"], failed["model"], failed["request_id"]) == ("error", "noisy", "seven")
    assert failed["error"].startswith("Traceback (most recent call last):\n")
    assert failed["error"].endswith("RuntimeError: raised by the model")


def test_failures_of_an_engine_are_logged_with_its_name(server_run: ServerRun) -> None:
    raised = find_line(
        server_run.objects, "the engine process leaves: RuntimeError: raised by order"
    )
    assert (raised["level"], raised["model"]) == ("error", "tensorrt_llm")
    assert raised["process"] != server_run.server_process
    assert raised["error"].startswith("Traceback (most recent call last):\n")
    crashed = find_line(server_run.objects, "Fatal Python error: Segmentation fault")
    assert (crashed["level"], crashed["model"]) == ("error", "tensorrt_llm")
    assert "in main\n" in crashed["message"]  # all of its stack, wherever the signal found it
    gone = [
        line
        for line in server_run.objects
        if line["message"].startswith("the engine process exited: ")
    ]
    assert [line["message"].rpartition(": ")[2] for line in gone] == [
        "raised by order",
        "killed by SIGSEGV",
        "killed by SIGKILL",
    ]
    assert {(line["level"], line["model"]) for line in gone} == {("error", "tensorrt_llm")}
    assert [
        line["level"]
        for line in server_run.objects
        if "starting the engine again" in line["message"]
    ] == ["warning"] * 3


def test_the_log_contains_no_prompts(server_run: ServerRun) -> None:
    assert PROMPT not in server_run.text


# -- failures at the start


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", *command]
    return subprocess.run(
        program,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_port_in_use_is_an_error_object(tmp_path: Path, busy_port: int) -> None:
    repository = make_repository(tmp_path)
    result = run(
        "slipstream.cli.main",
        "start",
        "--repo",
        str(repository),
        "--http-port",
        str(busy_port),
        "--log-format",
        "json",
    )
    assert (result.returncode, result.stdout) == (1, "")
    (last,) = parsed(result.stderr.splitlines())
    assert (last["level"], f"cannot use 127.0.0.1:{busy_port}" in last["message"]) == (
        "error",
        True,
    )


def test_errors_of_tritonserver_are_objects(tmp_path: Path) -> None:
    missing = run(
        "slipstream.cli.compat.tritonserver",
        "--log-format=json",
        f"--model-repository={tmp_path / 'none'}",
    )
    assert (missing.returncode, missing.stdout) == (1, "")
    objects = parsed(missing.stderr.splitlines())
    assert objects[-1]["message"] == "error: creating server: Internal - failed to load all models"
    assert {line["level"] for line in objects} == {"error"}
    (wrong,) = parsed(
        run("slipstream.cli.compat.tritonserver", "--log-format", "json").stderr.splitlines()
    )
    assert "--model-repository is missing" in wrong["message"]
    words = ["--log-format=json", f"--model-repository={tmp_path}", "--api-key=/none"]
    keyless = run("slipstream.cli.compat.tritonserver", *words)
    (unread,) = parsed(keyless.stderr.splitlines())
    assert (keyless.returncode, unread["message"].partition(":")[0]) == (1, "--api-key")


def test_an_unknown_log_format_is_refused() -> None:
    result = run("slipstream.cli.compat.tritonserver", "--log-format=yaml", "--model-repository=/x")
    assert result.returncode == 1
    assert result.stderr == (
        "tritonserver: error: --log-format must be one of default, ISO8601, json, not 'yaml'\n"
    )


# -- other output of the server's process

OTHER_OUTPUT = """
import os, subprocess, sys, threading, warnings
import logging
from slipstream.server.log.capture import capture_output
from slipstream.server.log.output import configure_log
configure_log(format="json")
with capture_output():
    print("a line of Python")
    os.write(2, b"printed by a library in C\\n")
    subprocess.call(["sh", "-c", "echo error: printed by a child >&2; echo '[WARNING] noted by a child'; sleep 0.1"])
    warnings.warn("look out")
    logging.getLogger("asyncio").error("lost a task", exc_info=ValueError("of a task"))
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    raise KeyError("an uncaught error")
"""


def test_all_output_of_the_process_is_in_the_log() -> None:
    result = subprocess.run(
        [sys.executable, "-c", OTHER_OUTPUT],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (1, "")
    objects = parsed(result.stderr.splitlines())
    levels = {
        words: find_line(objects, words)["level"]
        for words in (
            "a line of Python",
            "printed by a library in C",
            "error: printed by a child",
            "noted by a child",
            "UserWarning: look out",
            "lost a task",
            "exception in thread worker",
            "the server failed",
        )
    }
    assert list(levels.values()) == [
        "info",
        "warning",
        "error",
        "warning",
        "warning",
        "error",
        "error",
        "error",
    ]
    assert len(objects) == len(levels)
    assert find_line(objects, "exception in thread")["error"].endswith(
        "ZeroDivisionError: division by zero"
    )
    assert find_line(objects, "the server failed")["error"].endswith(
        "KeyError: 'an uncaught error'"
    )


# -- formats of a record

MOMENT_US = 1_731_708_085_210_518  # 15 November 2024, 22:01:25.210518 UTC

logger = logging.getLogger("slipstream.test")


def to_json(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert isinstance(fields, dict)
    return fields


def relayed(level: int, text: str, place: str = "x.py:1", process: int = 5) -> str:
    record = make_record(level, text, place=place, time_us=MOMENT_US, process=process)
    return RelayFormatter().format(record)


def test_a_json_line_contains_all_fields_of_a_record() -> None:
    record = make_record(
        logging.WARNING,
        "two\nlines",
        place="here.py:3",
        time_us=MOMENT_US,
        process=42,
        model="model",
        request_id="id",
    )
    assert to_json(record) == {
        "time": "2024-11-15T22:01:25.210518Z",
        "level": "warning",
        "message": "two\nlines",
        "model": "model",
        "request_id": "id",
        "process": 42,
        "place": "here.py:3",
    }


@pytest.mark.parametrize(
    ("before", "message"), [("it failed: ", "it failed"), ("", "ValueError: so")]
)
def test_a_json_line_separates_the_traceback_from_the_message(before: str, message: str) -> None:
    trace = "Traceback (most recent call last):\n  File x\nValueError: so"
    found = to_json(make_record(logging.ERROR, before + trace))
    assert (found["message"], found["error"]) == (message, trace)


def test_a_relayed_record_arrives_whole_and_other_lines_are_not_records() -> None:
    record = make_record(
        logging.ERROR,
        'a "quoted"\nline \u2028 \udcff',
        place="x.py:1",
        time_us=MOMENT_US,
        process=5,
        model="m",
        request_id="r",
    )
    line = RelayFormatter().format(record)
    assert "\n" not in line
    arrived = read_relayed(line)
    assert arrived is not None
    assert to_json(arrived) == to_json(record)
    assert arrived.getMessage() == record.getMessage()
    for other in ("", "{}", line[:-2], '\x1e{"level": "info"}'):
        assert read_relayed(other) is None


@pytest.fixture
def restored_settings() -> Iterator[Callable[..., None]]:
    before = HANDLER.settings
    yield configure_log
    configure_log(**asdict(before))


def relay(*lines: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, "".join(f"{line}\n" for line in lines).encode())
    os.close(writing)
    Relay(reading, 7, logging.WARNING, "engine").finish(10)


def test_lines_of_a_following_rank_begin_with_its_number(
    restored_settings: Callable[..., None], tmp_path: Path
) -> None:
    lines = [relayed(logging.INFO, "%d of", "a.py:1"), "Thread 0x1 (most recent call first):"]
    for format in ("json", "default"):
        restored_settings(file=str(tmp_path / format), format=format)
        reading, writing = os.pipe()
        os.write(writing, "".join(f"{line}\n" for line in lines).encode())
        os.close(writing)
        Relay(reading, 7, logging.WARNING, "engine", "rank 1: ").finish(10)
    written = (tmp_path / "json").read_text().splitlines()
    assert [json.loads(line)["message"] for line in written] == [
        "rank 1: %d of",
        "rank 1: Thread 0x1 (most recent call first):",
    ]
    plain = (tmp_path / "default").read_text()
    assert "rank 1: %d of" in plain
    assert "\nrank 1: Thread 0x1 (most recent call first):\n" in plain


def test_output_of_another_process_follows_the_servers_settings(
    restored_settings: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    lines = [
        relayed(logging.INFO, "a word", "a.py:1"),
        relayed(logging.WARNING, "a warning", "b.py:2"),
        "Traceback (most recent call last):",
        "  File x",
        "ValueError: so",
    ]
    restored_settings(file=str(file), format="ISO8601", info=False)
    relay(*lines)
    assert file.read_text() == (
        "2024-11-15T22:01:25Z W 5 b.py:2] a warning\n"
        "Traceback (most recent call last):\n  File x\nValueError: so\n"
    )
    restored_settings(file=str(tmp_path / "json"), format="json", info=True)
    relay(*lines)
    objects = parsed((tmp_path / "json").read_text().splitlines())
    assert [(line["level"], line["message"], line["process"]) for line in objects] == [
        ("info", "a word", 5),
        ("warning", "a warning", 5),
        ("error", "ValueError: so", 7),
    ]
    assert {line["model"] for line in objects} == {"engine"}
    assert objects[-1]["error"] == "\n".join(lines[2:])


@pytest.mark.usefixtures("restored_settings")
def test_a_client_can_change_the_format_at_run_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert update_log_settings({"log_format": "json"})["log_format"] == "json"
    assert log_settings()["log_format"] == "json"
    logger.warning("as an object")
    (logged,) = parsed(capsys.readouterr().err.splitlines())
    assert (logged["message"], logged["level"]) == ("as an object", "warning")
    with pytest.raises(InferenceError, match="invalid argument for --log_format, got: relayed"):
        update_log_settings({"log_format": "relayed"})


async def test_an_error_is_logged_with_the_request_it_came_from(
    restored_settings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def answers() -> AsyncIterator[InferResponse]:
        raise RuntimeError("a mistake of ours")
        yield

    restored_settings(format="json")
    request = InferRequest("chat", "1", {}, id="nine")
    try:
        async for _ in ModelCounters().record(request, answers()):
            pass
    except RuntimeError:
        logger.error("POST /v2/models/chat/infer failed")
    (logged,) = parsed(capsys.readouterr().err.splitlines())
    assert (logged["model"], logged["request_id"]) == ("chat", "nine")
