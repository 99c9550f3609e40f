"""Every option of every command has a help text that can be read alone, at 80 and 40 columns."""

from __future__ import annotations

import re

import pytest
from command_line import run_cli

from slipstream.cli.arguments import Parser
from slipstream.cli.commands import COMMANDS, SCRIPTS, create_parser
from slipstream.cli.compat import tritonserver_flags
from slipstream.cli.program import create_main_parser
from slipstream.cli.reference import render_reference

NAMES = sorted({*COMMANDS, *SCRIPTS})
PARSERS = [*NAMES, "tritonserver"]


def parser_of(name: str) -> Parser:
    return tritonserver_flags.create_parser() if name == "tritonserver" else create_parser(name)


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_full_phrase_of_help(name: str) -> None:
    parser = parser_of(name)
    poor = [action.dest for action in parser.arguments if len((action.help or "").split()) < 2]
    poor = [dest for dest in poor if dest not in ("text", "prompt")]  # "Prompt." is enough there
    assert poor == []
    without_end = [action.dest for action in parser.arguments if not str(action.help).endswith(".")]
    assert without_end == []
    assert parser.description


@pytest.mark.parametrize("name", PARSERS)
def test_options_without_an_effect_come_last(name: str) -> None:
    sections = re.findall(r"^(\S.*):$", parser_of(name).format_help(), re.MULTILINE)
    title = "accepted for compatibility; no effect"
    if title in sections:
        assert set(sections[sections.index(title) + 1 :]) <= {"not supported"}


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_the_terminal(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in parser_of(name).format_help().splitlines():
        # options are never cut, even if they are longer than the terminal is wide
        is_option = line.lstrip().startswith(("-", "{"))
        longest_word = max(map(len, line.split()), default=0)
        assert len(line) <= columns or is_option or longest_word > columns // 2, line


def test_the_main_help_fits_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = create_main_parser().format_help().splitlines()
    assert [line for line in lines if len(line) > 40 and "COMMAND --help" not in line] == []


@pytest.mark.parametrize("name", NAMES)
def test_help_contains_no_escape_codes_in_a_pipe(name: str) -> None:
    if name in COMMANDS:
        assert "\x1b" not in run_cli([name, "--help"]).stdout


def test_the_reference_has_every_command_and_option() -> None:
    text = render_reference()
    for name in COMMANDS:
        assert f"### slipstream {name}\n" in text
    for name in PARSERS:
        for action in parser_of(name).arguments:
            for option in action.option_strings:
                assert f"`{option}`" in text
    assert "%(" not in text
    assert render_reference() == text


@pytest.mark.parametrize("name", ["run", "batch"])
def test_the_engines_options_are_behind_help_all(name: str) -> None:
    short = run_cli([name, "--help"]).stdout
    whole = run_cli([name, "--help-all"])
    assert whole.exit_code == 0
    assert "see --help-all" in " ".join(short.split())
    for text in ("engines:", "capacity:", "--kv-cache-dtype", "What is not given is decided"):
        assert text not in short
        assert text in whole.stdout
    assert len(short.splitlines()) < 50
    assert "--kv-cache-dtype" in {
        option for action in create_parser(name).arguments for option in action.option_strings
    }
    assert run_cli([name, "--help"]).stdout == short, "showing the help changes nothing"


def test_start_shows_its_engines_options_and_its_other_name() -> None:
    assert "--kv-cache-dtype" in run_cli(["start", "-h"]).stdout
    assert "Serve a model repository or one model. Also: serve." in run_cli(["--help"]).stdout


def test_the_help_of_chat_names_its_commands() -> None:
    text = run_cli(["chat", "-h"]).stdout
    assert [
        name for name in ("/set", "/save", "/retry", "/help", "/exit") if name not in text
    ] == []
