"""The `slipstream` command itself."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from slipstream.cli import main as command
from slipstream.version import VERSION

runner = CliRunner()


def test_help_lists_every_command_and_loads_none_of_them():
    code = (
        "import sys; sys.argv = ['slipstream', '--help']\n"
        "from slipstream.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'httptools', 'uvloop', 'grpc', 'httpx', 'zmq', 'slipstream.cli.start'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[-1] == "[]"
    for name in ("import", "list", "remove", "start", "infer"):
        assert f" {name} " in found


@pytest.mark.parametrize("name", list(command.SUBCOMMANDS))
def test_every_command_has_help_of_its_own(name):
    result = runner.invoke(command.app, [name, "--help"])
    assert result.exit_code == 0
    assert f"{name} [OPTIONS]" in result.output


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("strat", "Did you mean 'start'?"),
        ("xyz", "There are: import, list"),
        ("xyz", "metrics, config, status."),
    ],
)
def test_an_unknown_command_gets_a_suggestion(typed, hint):
    result = runner.invoke(command.app, [typed])
    assert result.exit_code == 2
    assert hint in " ".join(result.output.replace("│", " ").split())


def test_version():
    assert runner.invoke(command.app, ["--version"]).output == f"slipstream {VERSION}\n"


def test_an_unknown_option_is_refused():
    result = runner.invoke(command.app, ["start", "--http-prot", "1"])
    assert result.exit_code == 2
    assert "--http-port" in result.output
