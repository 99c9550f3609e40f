"""`slipstream ps` and `slipstream stop`, with a real server."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_server
from command_line import run_cli
from tiny_server import TinyServer, make_repository

from slipstream.cli.arguments import CommandError
from slipstream.cli.processes.free_ports import check_free
from slipstream.cli.processes.other_ports import describe_others, kind_of
from slipstream.cli.processes.ps import duration
from slipstream.cli.processes.servers import RunningServer, find_servers, server_arguments
from slipstream.cli.processes.stop import choose_servers


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("/v/bin/python3 /v/bin/slipstream start --repo x", "--repo x"),
        ("python -P -m slipstream.cli.main serve gpt2", "gpt2"),
        ("python3.11 /v/bin/tritonserver --model-repository=x", "--model-repository=x"),
        ("python -m slipstream.cli.compat.tritonserver", ""),
        ("/v/bin/python /v/bin/triton start", ""),
        ("python -P -m slipstream.cli.models.run 12 start --repo x", "--repo x"),
        ("python -m slipstream.cli.models.run", None),
        ("python /v/bin/slipstream chat", None),
        ("python -m slipstream.engine_worker.process", None),
        ("/opt/tritonserver/bin/tritonserver --model-repository=x", None),
        ("vim slipstream start", None),
        ("python", None),
        ("", None),
    ],
)
def test_servers_are_found_by_their_command_lines(words: str, arguments: str | None) -> None:
    expected = None if arguments is None else arguments.split()
    assert server_arguments(words.split()) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.9, "5 s"), (723, "12m 03s"), (12000, "3h 20m"), (187200, "2d 04h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


ONE = RunningServer(11, 5.0, (8000, 8001), "one")
TWO = RunningServer(12, 5.0, (9000,), "two")


def test_the_only_server_is_chosen_without_a_name() -> None:
    assert choose_servers([ONE], None, None) == [ONE]
    assert choose_servers([ONE, TWO], "12", None) == [TWO]
    assert choose_servers([ONE, TWO], None, 8001) == [ONE]
    assert choose_servers([ONE, TWO], "all", None) == [ONE, TWO]


def test_servers_of_others_are_stopped_only_by_name() -> None:
    other = replace(ONE, own=False)
    assert choose_servers([other, TWO], None, None) == [TWO]
    assert choose_servers([other, TWO], "all", None) == [TWO]
    assert choose_servers([other, TWO], "11", None) == [other]
    assert choose_servers([other, TWO], None, 8000) == [other]


@pytest.mark.parametrize(
    ("servers", "process", "port", "text"),
    [
        ([], None, None, "no server runs on this machine"),
        (
            [replace(ONE, own=False)],
            None,
            None,
            "no server of this user and SLIPSTREAM_HOME runs; others run: process 11 .*: "
            "slipstream stop 11",
        ),
        ([replace(ONE, own=False)], "all", None, "no server of this user and SLIPSTREAM_HOME"),
        ([ONE, TWO], None, None, r"2 servers run: process 11 \(one, ports 8000 8001\); process 12"),
        ([ONE], "13", None, "no server has process 13; there are: process 11"),
        ([ONE], None, 80, "no server has port 80"),
    ],
)
def test_an_unclear_choice_is_refused(
    servers: list[RunningServer], process: str | None, port: int | None, text: str
) -> None:
    with pytest.raises(CommandError, match=text):
        choose_servers(servers, process, port)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TinyServer]:
    script = tmp_path / "slipstream"
    support = str(Path(tiny_server.__file__).parent)
    script.write_text(
        f"import sys\nsys.path.insert(0, {support!r})\nfrom tiny_server import main\nmain()\n"
    )
    found = TinyServer(make_repository(tmp_path), tmp_path / "temporary", script=script)
    yield found.wait_started()
    found.close()


def test_ps_lists_a_server_and_stop_ends_it(
    server: TinyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = server.process.pid
    found = {one.process: one for one in find_servers()}[process]
    assert (found.serves, set(found.ports)) == (
        str(tmp_path / "repository"),
        set(server.ports.values()),
    )
    assert found.own
    with monkeypatch.context() as patched:
        patched.setenv("SLIPSTREAM_HOME", str(tmp_path / "another home"))
        assert not {one.process: one for one in find_servers()}[process].own
    lines = run_cli(["ps"]).stdout.splitlines()
    assert lines[0].split() == ["PROCESS", "UP", "PORTS", "SERVES"]
    (line,) = [line for line in lines if line.split()[0] == str(process)]
    columns = re.split(" {2,}", line)  # as wide as those of any server of the machine
    assert columns[2:] == [" ".join(map(str, found.ports)), found.serves]
    result = run_cli(["stop", "--port", found.ports[0]])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"Stopping process {process} " in result.stdout
    assert server.wait_exit() == 0
    assert run_cli(["stop", process]).exit_code == 1


def test_errors_about_a_port_name_the_right_one(server: TinyServer) -> None:
    http, grpc, metrics = (
        server.ports[name] for name in ("HTTPService", "GRPCInferenceService", "Metrics Service")
    )
    host = "127.0.0.1"
    kinds = [kind_of(host, port) for port in (http, grpc, metrics, 1)]
    assert kinds == ["http", "grpc", "metrics", ""]
    for words, problem, right in (
        (["status", "-p", 1], "no server answers at 127.0.0.1:1; start one", http),
        (["infer", "1", "-p", 1], "no server answers at 127.0.0.1:1; start one", http),
        (["status", "-i", "grpc", "-p", 1], "no server answers gRPC at 127.0.0.1:1", grpc),
        (["metrics", "-p", 1], "no server answers at 127.0.0.1:1; start one", metrics),
        (["status", "-p", grpc], "does not speak HTTP; give its HTTP port", http),
        (["infer", "1", "-p", grpc], "does not speak HTTP; give its HTTP port", http),
        (["status", "-p", metrics], "has no models: it may be a metrics port", http),
        (["infer", "1", "-p", metrics], "has no models: it may be a metrics port", http),
        (["chat", "-p", metrics], "has no models: it may be a metrics port", http),
        (["status", "-i", "grpc", "-p", metrics], "does not speak gRPC; give its gRPC", grpc),
        (["status", "-i", "grpc", "-p", http], "does not speak gRPC; give its gRPC", grpc),
        (["metrics", "-p", http], "is not a metrics port (it has no /metrics)", metrics),
        (["metrics", "-p", grpc], "is not a metrics port (illegal request line)", metrics),
    ):
        result = run_cli([*words, "-u", host])
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert problem in line
        # other servers of this user may run beside it
        _, _, running = line.partition("; running here: ")
        assert re.search(rf"/repository \(-p {right}\)", running), (words, line)


def test_an_address_of_another_machine_is_not_explained(server: TinyServer) -> None:
    assert describe_others("10.1.2.3:8000", "http") == ""
    assert str(server.ports["HTTPService"]) in describe_others("localhost:1", "http")


def test_a_second_server_at_a_port_names_the_first(server: TinyServer, tmp_path: Path) -> None:
    port = server.ports["HTTPService"]
    with pytest.raises(CommandError) as refused:
        check_free("127.0.0.1", port, "--http-port")
    process = server.process.pid
    assert str(refused.value) == (
        f"cannot use 127.0.0.1:{port}: Address already in use; process {process} serves "
        f"{tmp_path / 'repository'} there; slipstream stop {process} ends it, or choose another "
        "port with --http-port"
    )
    home = {"SLIPSTREAM_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in home.items():
            patched.setenv(name, value)
        result = run_cli(["start", "--http-port", port, "--grpc-port", 0, "--metrics-port", 0])
    assert result.exit_code == 1
    assert not (tmp_path / "models").exists(), "no model is imported first"


def test_a_free_port_and_one_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match="; stop what uses it, or choose another port"):
            check_free("127.0.0.1", port, "--grpc-port")
    check_free("127.0.0.1", port, "--grpc-port")


def test_helper_models_are_not_offered(server: TinyServer) -> None:
    address = ["-u", f"127.0.0.1:{server.ports['HTTPService']}"]
    _, _, own, helpers = run_cli(["status", *address]).stdout.splitlines()
    assert own.split() == ["counter", "1", "READY"]
    names = "ensemble, postprocessing, preprocessing, tensorrt_llm"
    assert helpers == f"Ready helper models of these: {names}"
    for words in (["infer", "1", "-m", "nope"], ["status", "--config", "nope"]):
        line = run_cli([*words, *address]).stderr.rstrip()
        assert line.endswith("unknown model: 'nope' is not found; there are: counter")
    line = run_cli(["chat", "-m", "nope", *address]).stderr.rstrip()
    assert line == "error: there is no model 'nope' to talk to; there are: counter"
    table = [line for line in server.lines if line.startswith(("| ", "Ready helper"))]
    assert [line.split()[1] for line in table] == ["Model", "counter", "helper"]
    assert table[-1] == f"Ready helper models of these: {names}"
