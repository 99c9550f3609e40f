"""Every option of every command says in its help what it does."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli import main as command
from slipstream.cli.arguments import Parser
from slipstream.cli.compat.classic import COMMANDS, SCRIPTS

MODULES = sorted({module for module, _ in COMMANDS.values()} | set(SCRIPTS.values()))


class Caught(Exception):
    pass


def options_without_help(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options_without_help(child)
        elif not action.help:
            yield "/".join(action.option_strings) or action.dest


@pytest.mark.parametrize("name", MODULES)
def test_every_option_has_a_line_of_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Parser] = []

    def catch(self: Parser, arguments: Sequence[str]) -> argparse.Namespace:
        seen.append(self)
        raise Caught

    monkeypatch.setattr(Parser, "parse", catch)
    with pytest.raises(Caught):
        importlib.import_module(f"slipstream.cli.{name}").main([])
    assert list(options_without_help(seen[0])) == []
    assert seen[0].description


@pytest.mark.parametrize("name", sorted(command.SUBCOMMANDS))
def test_every_option_of_the_native_commands_has_one_too(name: str) -> None:
    loaded = command._load(name)
    assert isinstance(loaded, typer.core.TyperCommand)
    assert [
        parameter.name for parameter in loaded.params if not getattr(parameter, "help", None)
    ] == []


@pytest.mark.parametrize("name", sorted(command.SUBCOMMANDS))
def test_help_is_a_page_and_cuts_no_option_short(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(command.app, [name, "--help"]).output
    assert len(text.splitlines()) <= 40, text
    for parameter in command._load(name).params:
        assert all(option in text for option in parameter.opts if option.startswith("-"))
