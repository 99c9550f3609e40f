"""Runs a command line of `slipstream` in this process and keeps its output."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cli.program import run


@dataclass(frozen=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str
    output: str  # stdout and stderr in the order of printing


class _Tee(io.StringIO):
    """A stream whose text goes to a second stream, too."""

    def __init__(self, both: io.StringIO) -> None:
        super().__init__()
        self._both = both

    def write(self, text: str) -> int:
        self._both.write(text)
        return super().write(text)


def run_cli(arguments: Sequence[object], program: str = "slipstream") -> CommandResult:
    """Run `slipstream ARGUMENTS`, or `triton ARGUMENTS`."""
    both = io.StringIO()
    stdout = _Tee(both)
    stderr = _Tee(both)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = run([str(word) for word in arguments], program)
        except SystemExit as end:
            code = int(end.code or 0)
    return CommandResult(code, stdout.getvalue(), stderr.getvalue(), both.getvalue())
