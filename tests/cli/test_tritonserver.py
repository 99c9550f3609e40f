"""The command `tritonserver`: its flags, its name, its log lines, its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from tiny_server import HERE, MODEL, ROOT, children_of, command_of, is_running, make_repository, wait_for

from slipstream.cli import tritonserver
from slipstream.cli.tritonserver_flags import FLAGS, FlagError, parse_flags

SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from slipstream.server import engine_child
engine_child.ENGINE_COMMAND = (sys.executable, {here!r} + "/scripted_engine.py")
from slipstream.cli.tritonserver import main
main()
"""
LAUNCHER = [
    "--model-control-mode=explicit", "--load-model=tensorrt_llm", "--grpc-port=8001", "--http-port=8000",
    "--metrics-port=8002", "--disable-auto-complete-config", "--backend-config=python,shm-region-prefix-name=prefix0_",
]  # fmt: skip


class Tritonserver:
    def __init__(self, folder: Path, *flags: str, engine: str = "fine", **environment: str) -> None:
        self.log = folder / "log.txt"
        (folder / "tmp").mkdir()
        repository = make_repository(folder, engine)
        script = SCRIPT.format(here=str(HERE))
        settings = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")} | environment
        ports = ["--http-port", "0", "--grpc-port=0", "--metrics-port", "0", "--http-address=127.0.0.1"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, f"--model-repository={repository}", *ports, *flags],
                env=settings, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_started(self) -> Tritonserver:
        wait_for(lambda: "Started Metrics Service" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    @property
    def url(self) -> str:
        line = next(line for line in self.lines if "Started HTTPService at" in line)
        return f"http://{line.rpartition(' ')[2]}"

    def engines(self) -> list[int]:
        return [child for child in children_of(self.process.pid) if "scripted_engine" in command_of(child)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Tritonserver]]:
    servers: list[Tritonserver] = []

    def start(*flags: str, **more: str) -> Tritonserver:
        servers.append(Tritonserver(tmp_path, *flags, **more))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(30)


def generate(server: Tritonserver) -> httpx.Response:
    body = {"text_input": "5", "max_tokens": 3}
    return httpx.post(f"{server.url}/v2/models/{MODEL}/generate", json=body, timeout=30)


def test_it_serves_under_its_name_and_leaves_on_sigterm(serve: Callable[..., Tritonserver]) -> None:
    server = serve("--id=mine", "--log-verbose=1", "--grpc-infer-thread-count=4").wait_started()
    assert Path(f"/proc/{server.process.pid}/comm").read_text() == "tritonserver\n"
    assert generate(server).json()["text_output"] == "6 7 8"
    assert httpx.get(f"{server.url}/v2").json()["name"] == "mine"
    started = [line.partition("] ")[2].partition(" at ")[0] for line in server.lines if "] Started " in line]
    assert started == ["Started GRPCInferenceService", "Started HTTPService", "Started Metrics Service"]
    assert any(line.split() == ["|", "Model", "|", "Version", "|", "Status", "|"] for line in server.lines)
    assert any(line.split() == ["|", MODEL, "|", "1", "|", "READY", "|"] for line in server.lines)
    assert sum("without an effect in this server: --grpc-infer-thread-count" in line for line in server.lines) == 1
    assert sum("without an API key" in line for line in server.lines) == 1  # gRPC is at 0.0.0.0
    (engine,) = server.engines()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert not is_running(engine)


def test_a_model_that_does_not_load_ends_it_with_tritons_words(serve: Callable[..., Tritonserver]) -> None:
    server = serve(engine="bad")
    assert server.process.wait(60) == 1
    assert server.lines[-1] == "error: creating server: Internal - failed to load all models"
    assert any("UNAVAILABLE: Internal: ValueError: this engine folder is bad by order" in line for line in server.lines)


def test_a_model_that_does_not_load_may_be_tolerated(serve: Callable[..., Tritonserver]) -> None:
    server = serve("--exit-on-error=false", engine="bad").wait_started()
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 400
    answer = generate(server)
    assert (answer.status_code, answer.json()) == (
        404, {"error": f"Request for unknown model: '{MODEL}' has no available versions"},
    )  # fmt: skip


def test_engines_come_and_go_by_request(serve: Callable[..., Tritonserver]) -> None:
    server = serve("--model-control-mode=explicit").wait_started()
    control = f"{server.url}/v2/repository"
    assert server.engines() == []
    assert httpx.post(f"{control}/index").json()[0] == {"name": MODEL}
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    (engine,) = server.engines()
    assert generate(server).json()["text_output"] == "6 7 8"
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    assert server.engines() == [engine]  # nothing has changed, so it goes on
    config = httpx.get(f"{server.url}/v2/models/tensorrt_llm/config").json()
    config["dynamic_batching"]["max_queue_delay_microseconds"] = 77
    body: dict[str, object] = {"parameters": {"config": json.dumps(config)}}
    assert httpx.post(f"{control}/models/tensorrt_llm/load", json=body, timeout=60).text == ""
    assert httpx.get(f"{server.url}/v2/models/tensorrt_llm/config").json() == config
    wait_for(lambda: not is_running(engine))
    (engine,) = server.engines()  # another one, which the text model above goes on with
    assert generate(server).json()["text_output"] == "6 7 8"
    body = {"parameters": {"unload_dependents": True}}
    assert httpx.post(f"{control}/models/{MODEL}/unload", json=body).status_code == 200
    assert server.engines() == [engine]  # it was asked for by its own name, too
    assert httpx.post(f"{control}/models/tensorrt_llm/unload").status_code == 200
    wait_for(lambda: not is_running(engine))
    assert generate(server).status_code == 404
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    assert httpx.post(f"{control}/models/{MODEL}/load", timeout=60).status_code == 200
    assert generate(server).json()["text_output"] == "6 7 8"


def test_the_log_goes_to_the_file_it_is_told(serve: Callable[..., Tritonserver], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    server = serve(f"--log-file={file}", "--log-format=ISO8601", "--allow-grpc=false", "--allow-metrics", "false")
    wait_for(lambda: file.exists() and "Started HTTPService" in file.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert "Started GRPC" not in file.read_text()
    assert "Started Metrics" not in file.read_text()
    assert server.lines == []


def test_another_rank_waits_and_serves_nothing(serve: Callable[..., Tritonserver]) -> None:
    server = serve(OMPI_COMM_WORLD_RANK="1")
    comm = Path(f"/proc/{server.process.pid}/comm")
    wait_for(lambda: comm.read_text() == "tritonserver\n")
    assert children_of(server.process.pid) == []
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) in (0, -signal.SIGTERM)
    assert server.lines == []


# -- flags


def test_both_spellings_mean_the_same() -> None:
    joined = parse_flags([*LAUNCHER, "--model-repository=/a", "--model-store=/b", "--strict-readiness=false"])
    more = ["--model-repository", "/a", "--model-store", "/b", "--strict-readiness", "false"]
    apart = parse_flags([*(word for flag in LAUNCHER for word in flag.split("=", 1)), *more])
    assert joined.values == apart.values
    assert joined["model-repository"] == ["/a", "/b"]
    assert joined["disable-auto-complete-config"] is True
    assert joined.ignored == ["backend-config"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--modle-repository=/a"], "unknown flag --modle-repository; did you mean --model-repository?"),
        (["--zzz"], "unknown flag --zzz (tritonserver --help lists all flags)"),
        (["--http-port=x"], "--http-port must be a number, not 'x'"),
        (["--http-port"], "--http-port needs a value"),
        (["--exit-on-error=maybe"], "--exit-on-error must be true or false, not 'maybe'"),
        (["serve"], "unexpected argument 'serve'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags: list[str], text: str) -> None:
    with pytest.raises(FlagError) as raised:
        parse_flags(flags)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--model-repository is missing"),
        (["--model-repository=/a", "--model-control-mode=never"], "must be one of none, poll, explicit"),
        (["--model-repository=/a", "--load-model=x"], "only be given with --model-control-mode=explicit"),
        (["--model-repository=/a", "--allow-sagemaker=true"], "is not supported"),
        (["--model-repository=/a", "--http-restricted-api=x:y=z"], "unknown API 'x'"),
        (["--model-repository=/a", "--http-header-forward-pattern=("], "is no regular expression"),
        (["--model-repository=/a", "--grpc-use-ssl=true"], "needs --grpc-server-cert"),
    ],
)
def test_what_cannot_be_done_ends_it_with_code_1(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in tritonserver.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert tritonserver.run(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("tritonserver: error: ")
    assert text in error
    assert error.count("\n") == 1


def test_the_defaults_are_tritons() -> None:
    options = tritonserver.server_options(parse_flags(["--model-repository=/a", "--http-address=10.0.0.1"]))
    assert [(port.address, port.number, port.open) for port in (options.http, options.grpc, options.metrics)] == [
        ("10.0.0.1", 8000, True), ("0.0.0.0", 8001, True), ("10.0.0.1", 8002, True),
    ]  # fmt: skip
    assert (options.control_mode, options.exit_timeout_seconds, options.strict_readiness) == ("none", 30.0, True)
    assert (options.allow_python_models, options.allow_client_shared_memory) == (False, False)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert tritonserver.run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{name} " in printed for name in FLAGS)


def test_the_rank_is_read_from_the_launchers_variables() -> None:
    assert tritonserver.rank({}) == 0
    assert tritonserver.rank({"SLURM_PROCID": "3"}) == 3
    assert tritonserver.rank({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}) == 1
