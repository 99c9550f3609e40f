"""The `slipstream` command. Each subcommand's file is loaded only when it runs, so that help is
immediate.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.cli.compat import classic
from slipstream.cli.log import running_as
from slipstream.version import VERSION


@dataclass(frozen=True)
class Subcommand:
    module: str
    function: str
    help: str


SUBCOMMANDS = {
    "import": Subcommand(
        "slipstream.cli.import_model", "import_model", "Bring a model into the repository."
    ),
    "list": Subcommand(
        "slipstream.cli.list_models", "list_models", "Show the models of the repository."
    ),
    "remove": Subcommand(
        "slipstream.cli.remove_model", "remove_model", "Take a model out of the repository."
    ),
    "start": Subcommand("slipstream.cli.start", "start", "Serve the repository, or a model."),
    "serve": Subcommand(
        "slipstream.cli.start", "start", "Serve one model, from wherever it is: serve MODEL."
    ),
    "infer": Subcommand("slipstream.cli.infer", "infer", "Send a prompt to a running server."),
}


class _LateCommand(TyperCommand):
    """Stands in for a subcommand in listings; becomes the real one when it is called."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        assert self.name is not None
        return _load(self.name).make_context(info_name, args, parent=parent, **extra)


class _Subcommands(TyperGroup):
    def main(self, args: Any = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        with running_as(prog_name):
            return super().main(args, prog_name, **extra)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = SUBCOMMANDS.get(cmd_name)
        return None if found is None else _LateCommand(cmd_name, help=found.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in SUBCOMMANDS:
            close = difflib.get_close_matches(args[0], SUBCOMMANDS, n=1)
            hint = (
                f" Did you mean '{close[0]}'?"
                if close
                else f" There are: {', '.join(self.list_commands(ctx))}."
            )
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    subcommand = SUBCOMMANDS[name]
    function = getattr(importlib.import_module(subcommand.module), subcommand.function)
    # boxes would cut long options short
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=subcommand.help)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_Subcommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve large language models with Triton's commands, repositories and protocols.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {VERSION}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


classic.register(app)


def main() -> None:
    """`triton` is the same program, whose log lines are Triton CLI's."""
    app(prog_name="triton" if Path(sys.argv[0]).name == "triton" else "slipstream")


if __name__ == "__main__":
    main()
