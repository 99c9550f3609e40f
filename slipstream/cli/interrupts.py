"""Ctrl-C: one line and exit code 130, at any time, and nothing left behind.

While modules are imported, the process ends in the signal's handler, because an exception there
would come out of any of them. Later Ctrl-C is a KeyboardInterrupt, so that work that has begun is
undone. A terminal sends Ctrl-C to all processes of a command. Those that do a part of its work
ignore it, and end when the command tells them, so that there is one line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT  # exit code
INTERRUPTED_LINE = "interrupted; nothing was left behind"


def end_at_interrupt(name: str) -> None:
    """Let Ctrl-C end this process at once, until `raise_at_interrupt`. name: of the program

    A program in the background, which ignores Ctrl-C, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end, name))


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt: from now on there may be something to undo."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(name: str, number: int, frame: FrameType | None) -> None:
    # the modules that format lines may be the ones that are being imported
    start = "triton - ERROR - " if name == "triton" else "error: "
    os.write(2, f"{start}{INTERRUPTED_LINE}\n".encode())
    os._exit(INTERRUPTED)


def run_part(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a process that does a part of this command's work; return its exit code.

    After Ctrl-C, raise KeyboardInterrupt when the process has undone its work. Another Ctrl-C kills
    it. Call this from the main thread.
    """
    import subprocess  # not while the program starts: see above

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits this
    try:
        process = subprocess.Popen(command, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            process.wait()
        raise


def end_with_the_command() -> None:
    """Let the command that runs this part end it: its SIGTERM raises KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
