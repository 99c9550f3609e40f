"""The lines that commands print about their work: one form for `slipstream`, Triton CLI's for
`triton`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from slipstream.server.log.output import HANDLER

# control characters in other programs' text, which could change the state of the terminal
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROGRAM: ContextVar[str] = ContextVar("program", default="slipstream")


def log(level: str, message: str) -> None:
    """Print one line on stdout, or on stderr for an ERROR.

    With `--log-format json` the line is a record of the server's log instead.
    """
    text = " ".join(message.split())
    if HANDLER.settings.format == "json":
        HANDLER.write_console(logging.getLevelNamesMapping()[level], text)
        return
    stream = sys.stderr if level == "ERROR" else sys.stdout
    print(format_line(level, CONTROL.sub("", text)), file=stream, flush=True)


def format_line(level: str, text: str) -> str:
    """Return a line. Scripts around Triton CLI look for its form, `triton - INFO - text`."""
    if program() == "triton":
        return f"triton - {level} - {text}"
    return f"error: {text}" if level == "ERROR" else f"[{level}] {text}"


def program() -> str:
    """Return the name of the running program: `slipstream` or `triton`."""
    return _PROGRAM.get()


@contextmanager
def running_as(name: str) -> Iterator[None]:
    before = _PROGRAM.set("triton" if name == "triton" else "slipstream")
    try:
        yield
    finally:
        _PROGRAM.reset(before)
