"""The `slipstream` program: finds the command, prints the grouped help."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Sequence

from slipstream.cli.arguments import Parser
from slipstream.cli.commands import (
    ALIASES,
    COMMANDS,
    GROUPS,
    HIDDEN,
    create_parser,
    resolve_alias,
    run_command,
)
from slipstream.cli.log import program, running_as
from slipstream.version import VERSION

_DESCRIPTION = "Serve large language models with Triton's commands, repositories and protocols."
_NAME_WIDTH = 2 + max(map(len, COMMANDS))


def run(arguments: Sequence[str], name: str = "slipstream") -> int:
    """Run one command line and return the exit code. Usage errors raise SystemExit(2)."""
    with running_as(name):
        if not arguments:
            print(create_main_parser().format_help())
            return 2
        if arguments[0].startswith("-"):
            create_main_parser().parse(arguments)
        if arguments[0] == "help":
            return _print_help(arguments[1:])
        command, *rest = resolve_alias(arguments)
        _check_command(command)
        return run_command(command, rest)


def create_main_parser() -> Parser:
    """Return the parser of the options before a command. Its help lists every command."""
    parser = Parser(
        program(),
        textwrap.fill(_DESCRIPTION, max(20, shutil.get_terminal_size().columns - 2)),
        epilog=_command_list(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND ...", help=argparse.SUPPRESS)
    parser.add_argument(
        "--version",
        action="version",
        version=f"slipstream {VERSION}",
        help="Print the version and exit.",
    )
    return parser


def _command_list() -> str:
    """Return the commands under their headings, wrapped to the width of the terminal."""
    width = max(_NAME_WIDTH + 22, shutil.get_terminal_size().columns - 2)
    lines = []
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        for name, command in group.items():
            if name in HIDDEN:
                continue
            lines += textwrap.wrap(
                command.help + _also(name),
                width,
                initial_indent=f"  {name:<{_NAME_WIDTH}}",
                subsequent_indent=" " * (_NAME_WIDTH + 2),
            )
        lines.append("")
    return "\n".join([*lines, f"Run '{program()} COMMAND --help' for the options of a command."])


def _also(name: str) -> str:
    """Return the aliases of a command, for its line in the help."""
    names = {**HIDDEN, **ALIASES}
    aliases = [
        alias
        for alias, command in names.items()
        if command == name and COMMANDS.get(alias, COMMANDS[name]).module == COMMANDS[name].module
    ]
    return f" Also: {', '.join(aliases)}." if aliases else ""


def _print_help(arguments: Sequence[str]) -> int:
    """Print the help of a command, or of the program: `slipstream help [COMMAND]`."""
    if not arguments:
        print(create_main_parser().format_help())
        return 0
    (command,) = resolve_alias(arguments[:1])
    _check_command(command)
    print(create_parser(command).format_help())
    return 0


def _check_command(name: str) -> None:
    if name in COMMANDS:
        return
    close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(COMMANDS)}"
    create_main_parser().error(f"there is no command '{name}'; {hint}")
