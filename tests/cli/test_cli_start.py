"""`slipstream start`: what it decides before it serves. tests/server/test_lifecycle.py has the
serving.
"""

from pathlib import Path

import pytest
from command_line import run_cli

from slipstream.cli import start as start_module
from slipstream.server import lifecycle


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def served(monkeypatch):
    """The options the server would have been run with."""
    seen = []

    def run_server(options):
        seen.append(options)
        return 0

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    return seen


@pytest.fixture
def imports(monkeypatch):
    """The commands that would have been run, and their exit code."""
    seen = {"commands": [], "code": 0}

    def call(arguments, env):
        seen["commands"].append(arguments[1:])
        return seen["code"]

    monkeypatch.setattr(start_module.subprocess, "call", call)
    return seen


def test_the_defaults_are_tritons_ports_on_the_loopback_address(home, served):
    result = run_cli(["start", "--repo", "/some/models"])
    assert result.exit_code == 0
    (options,) = served
    assert options.repositories == (Path("/some/models"),)
    assert [
        (port.address, port.number, port.open)
        for port in (options.http, options.grpc, options.metrics)
    ] == [
        ("127.0.0.1", 8000, True),
        ("127.0.0.1", 8001, True),
        ("127.0.0.1", 8002, True),
    ]
    assert options.exit_timeout_seconds == 30
    assert options.engine_settings == {}


@pytest.mark.parametrize("spelling", ["--repo", "--model-repository", "--model-store"])
@pytest.mark.parametrize("joined", [True, False])
def test_every_spelling_of_the_repository(home, served, spelling, joined):
    arguments = [f"{spelling}=/x"] if joined else [spelling, "/x"]
    assert run_cli(["start", *arguments]).exit_code == 0
    assert served[0].repositories == (Path("/x"),)


def test_a_repository_in_a_home_that_is_not_known_is_refused(home, served):
    result = run_cli(["start", "--repo", "~no.such.user/x"])
    assert (result.exit_code, served) == (1, [])
    assert (
        result.output
        == "error: --repo ~no.such.user/x: the home folder that it begins with is not known here\n"
    )


def test_help_says_that_it_takes_a_model_too():
    assert "Serve a model repository or one model." in run_cli(["start", "--help"]).output


def test_overrides_reach_the_engine_and_its_supervisor(home, served):
    given = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--watchdog-secs",
        "5",
        "--server-timeout",
        "7",
    ]
    run_cli(["start", "--repo", "/x", *given])
    assert served[0].engine_settings == {"dtype": "float32", "device": "cpu"}
    assert (served[0].supervision.silence_seconds, served[0].supervision.start_seconds) == (5, 7)


def test_without_a_repository_the_default_model_is_imported_first(home, served, imports):
    result = run_cli(["start"])
    assert result.exit_code == 0
    assert imports["commands"] == [
        [
            "-P",
            "-m",
            "slipstream.cli.main",
            "import",
            "-m",
            "smollm2-135m",
            "--repo",
            str(home / "models"),
        ]
    ]
    assert served[0].repositories == (home / "models",)
    assert "smollm2-135m" in result.output


def test_an_existing_repository_is_served_as_it_is(home, served, imports):
    (home / "models" / "mine").mkdir(parents=True)
    (home / "models" / "mine" / "config.pbtxt").touch()
    assert run_cli(["start"]).exit_code == 0
    assert imports["commands"] == []


def test_an_import_that_fails_ends_it_with_the_way_out(home, served, imports):
    imports["code"] = 1
    result = run_cli(["start"])
    assert result.exit_code == 1
    assert served == []
    assert "slipstream import -m NAME --source PATH" in result.output.splitlines()[-1]


def test_a_failure_is_one_last_line_and_exit_code_1(home, monkeypatch):
    def run_server(options):
        raise lifecycle.StartFailed("the cause; the remedy")

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    result = run_cli(["start", "--repo", "/x"])
    assert result.exit_code == 1
    assert result.output == "error: the cause; the remedy\n"


@pytest.mark.parametrize("option", ["--watchdog-secs", "--server-timeout", "--exit-timeout-secs"])
def test_seconds_that_no_server_could_live_with_are_refused(home, served, option):
    result = run_cli(["start", "--repo", "/some/models", option, "-1"])
    assert (result.exit_code, served) == (2, [])
    assert option in result.output


def test_traces_are_asked_for_as_of_tritonserver(home, served, tmp_path):
    given = ["level=TIMESTAMPS", "rate=7", f"triton,file={tmp_path}/trace.json"]
    options = [word for text in given for word in ("--trace-config", text)]
    assert run_cli(["start", "--repo", "/x", *options]).exit_code == 0
    assert served[0].trace_settings == {
        "trace_file": f"{tmp_path}/trace.json",
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "7",
    }
    assert served[0].trace_export is None
    options = [
        "--trace-config=mode=opentelemetry",
        "--trace-config=opentelemetry,url=http://collector:1/v1/traces",
    ]
    assert run_cli(["start", "--repo", "/x", *options]).exit_code == 0
    assert served[1].trace_export.url == "http://collector:1/v1/traces"
    result = run_cli(["start", "--repo", "/x", "--trace-config", "rate=often"])
    assert (result.exit_code, len(served)) == (1, 2)
    assert result.output == "error: --trace-config: rate must be a whole number, not 'often'\n"
