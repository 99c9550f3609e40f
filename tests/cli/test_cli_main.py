"""The `slipstream` command itself: commands, grouped help, suggestions."""

import subprocess
import sys

import pytest
from command_line import run_cli

from slipstream.cli.commands import ALIASES, COMMANDS, GROUPS, HIDDEN, resolve_alias
from slipstream.version import VERSION


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_and_imports_none_of_them(words):
    code = (
        f"import sys; sys.argv = ['slipstream', *{words}]\n"
        "from slipstream.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'httpx', 'grpc', 'httptools', 'uvloop', 'zmq', 'rich', 'slipstream.cli.start'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert (f"\n  {name} " in found) == (name not in HIDDEN)


def test_help_has_a_section_for_each_group():
    lines = run_cli(["--help"]).stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options:", "Use:", "Operate:", "Triton and TensorRT-LLM:"]
    for title, group in GROUPS.items():
        start = lines.index(f"{title}:") + 1
        shown = [name for name in group if name not in HIDDEN]
        listed = [line.split()[0] for line in lines[start : start + len(shown)]]
        assert listed == shown


def test_without_arguments_help_is_printed_and_the_exit_code_is_2():
    result = run_cli([])
    assert (result.exit_code, result.stderr) == (2, "")
    assert result.stdout.strip() == run_cli(["--help"]).stdout.strip()


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name, option):
    result = run_cli([name, option])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: slipstream {name} [options]")


def test_help_of_a_command_can_be_asked_for_by_name():
    assert run_cli(["help", "chat"]).stdout.strip() == run_cli(["chat", "-h"]).stdout.strip()
    assert run_cli(["help", "caht"]).exit_code == 2


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("strat", "did you mean 'start'? (see slipstream --help)"),
        ("worksapce", "did you mean 'workspace'? (see slipstream --help)"),
        ("xyz", f"there are: {', '.join(COMMANDS)} (see slipstream --help)"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(typed, hint):
    result = run_cli([typed])
    assert result.exit_code == 2
    assert result.output == f"error: there is no command '{typed}'; {hint}\n"


def test_version():
    assert run_cli(["--version"]).output == f"slipstream {VERSION}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["start", "--http-prot", "1"],
            "there is no option --http-prot; did you mean --http-port?",
        ),
        (["infer", "--promt", "x"], "there is no option --promt; did you mean --prompt?"),
        (["import"], "the following arguments are required: -m/--model"),
        (["infer", "x", "-i", "grpc"], "-m is required with -i grpc: name the model"),
        (["start", "a", "b"], "unexpected argument 'b'"),
        (["start", "--http-port", "x"], "argument --http-port: invalid int value: 'x'"),
    ],
)
def test_a_usage_error_is_one_line_with_exit_code_2(words, text):
    result = run_cli(words)
    assert result.exit_code == 2
    assert result.output == f"error: {text} (see slipstream {words[0]} --help)\n"
    assert run_cli(words, "triton").stderr.startswith(f"triton - ERROR - {text}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ls", "list"),
        ("ls --repo x", "list --repo x"),
        ("pull smollm2-135m --repo x", "import -m smollm2-135m --repo x"),
        ("pull -m gpt2", "import -m gpt2"),
        ("rm all", "remove all"),
        ("rm", "remove"),
        ("list x", "list x"),
    ],
)
def test_aliases_stand_for_commands(typed, meant):
    assert resolve_alias(typed.split()) == meant.split()


def test_aliases_run_and_are_in_the_help(tmp_path):
    assert (
        run_cli(["ls", "--repo", tmp_path]).output == run_cli(["list", "--repo", tmp_path]).output
    )
    found = run_cli(["rm", "x", "--repo", tmp_path])
    assert found.stderr.startswith(f"error: there is no model 'x' in {tmp_path}")
    assert run_cli(["help", "rm"]).stdout == run_cli(["help", "remove"]).stdout
    assert "did you mean 'pull'?" in run_cli(["pul"]).stderr
    help_text = run_cli(["--help"]).stdout
    assert all(f"Also: {alias}." in help_text for alias in ALIASES)
