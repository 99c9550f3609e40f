"""The lines that commands print about what they do: one form for `slipstream`, Triton CLI's for
`triton`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, NoReturn

import typer

from slipstream.server.log.output import HANDLER

# what others write must not steer the terminal
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROGRAM: ContextVar[str] = ContextVar("program", default="slipstream")


# Triton CLI has it for every command.
VerboseOption = Annotated[
    bool, typer.Option("-v", "--verbose", help="No effect: all there is to say is said.")
]


def log(level: str, message: str) -> None:
    """One line on stdout, an ERROR on stderr; a record on stderr where a server's log is made of
    them.
    """
    if HANDLER.settings.format == "json":
        number = logging.getLevelNamesMapping()[level]
        HANDLER.write_console(number, " ".join(message.split()))
        return
    stream = sys.stderr if level == "ERROR" else sys.stdout
    print(line(level, CONTROL.sub("", " ".join(message.split()))), file=stream, flush=True)


def line(level: str, text: str) -> str:
    """`triton - INFO - text` is what scripts around Triton CLI look for."""
    if program() == "triton":
        return f"triton - {level} - {text}"
    return f"error: {text}" if level == "ERROR" else f"[{level}] {text}"


def program() -> str:
    """`triton` where the command line begins with it."""
    return _PROGRAM.get()


@contextmanager
def running_as(name: str | None) -> Iterator[None]:
    before = _PROGRAM.set("triton" if name == "triton" else "slipstream")
    try:
        yield
    finally:
        _PROGRAM.reset(before)


def fail(message: str) -> NoReturn:
    """One line, and exit code 1."""
    log("ERROR", message)
    raise typer.Exit(1)
