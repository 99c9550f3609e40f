"""Parsing as the old scripts parsed, and forgiving where their documents and their code disagreed.

Long options are taken with '-' or '_', as `--x v` or `--x=v`, and by a unique beginning. What is
unknown is refused in one line with the nearest known name.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from slipstream.cli.log import log
from slipstream.weights.flags import SHORT_NAMES, Flag


class CommandError(Exception):
    """What to tell the user in one line; the command ends with code 1."""


class Parser(argparse.ArgumentParser):
    """`argparse` with every spelling of a long option, and suggestions."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        known, unknown = self.parse_known_args(self._spelled(arguments))
        if unknown:
            self.error(self._unknown_text(unknown[0]))
        return known

    def error(self, message: str) -> NoReturn:
        log("ERROR", f"{message} (see {self.prog} --help)")
        raise SystemExit(2)

    def _long_options(self) -> dict[str, str]:
        """The name with '-' for every '_' → the option as it was declared; those of subcommands,
        too.
        """
        options = {}
        for action in self._actions:
            for option in action.option_strings:
                options[option.replace("_", "-")] = option
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    options.update(child._long_options())
        return options

    def _spelled(self, arguments: Sequence[str]) -> list[str]:
        options = self._long_options()
        spelled: list[str] = []
        for position, argument in enumerate(arguments):
            if argument == "--":
                return [*spelled, *arguments[position:]]
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = options.get(name.replace("_", "-"), name)
            spelled.append(name + equals + value)
        return spelled

    def _unknown_text(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument '{argument}'"
        close = difflib.get_close_matches(name.replace("_", "-"), self._long_options(), n=1)
        hint = f"; did you mean {self._long_options()[close[0]]}?" if close else ""
        return f"there is no option {name}{hint}"


_NUMBER_OF_VALUES: dict[str, dict[str, Any]] = {
    "nothing": {"action": "store_true"},
    "value": {},
    "maybe": {"nargs": "?", "const": ""},
    "values": {"nargs": "*"},
}


def add_flags(parser: Parser, flags: Iterable[Flag]) -> None:
    """Declare a table of flags; what is not given stays out of the result."""
    for flag in flags:
        names = [f"--{flag.name}"]
        if flag.name in SHORT_NAMES:
            names.append(f"-{SHORT_NAMES[flag.name]}")
        parser.add_argument(
            *names, default=argparse.SUPPRESS, help=flag.text, **_NUMBER_OF_VALUES[flag.takes]
        )


def explain_flags(flags: Iterable[Flag], given: argparse.Namespace) -> None:
    """One line for each flag that changes nothing; CommandError for the first that cannot be
    honoured.
    """
    for flag in flags:
        if not hasattr(given, flag.name):
            continue
        if flag.effect == "refused":
            raise CommandError(f"--{flag.name}: {flag.text}")
        if flag.effect == "explained":
            print(f"[INFO] --{flag.name} changes nothing: {flag.text}", flush=True)
