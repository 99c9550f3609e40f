"""What else is printed around a server, made lines of its log: by its processes, libraries, and by
Python itself.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import logging as standard_logging
import os
import re
import select
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TextIO

from slipstream.server.log import log as logging
from slipstream.server.log.lines import LineCutter

# How the account of a failure begins. The lines that come with it are one record.
_ALARM = re.compile(
    r"Traceback |Fatal |terminate called|Thread 0x|Current thread|(\w+ - )?(ERROR|error)\b|E\d{4} "
)
_LEVEL_MARK = re.compile(r"\[(INFO|WARNING)\] ")  # of our own commands' lines
_TOGETHER_SECONDS = 0.05
_MOST_LINES = 1000  # of one record
_PIPE_BYTES = 1 << 20
_LEVELS: dict[int, logging.Level] = {standard_logging.INFO: "I", standard_logging.WARNING: "W"}


class Relay:
    """Reads a pipe in a thread, to its end: the records of a process of ours, and whatever else is
    printed there.
    """

    def __init__(
        self, descriptor: int, process: int, usual: logging.Level, model: str = ""
    ) -> None:
        self._descriptor = descriptor
        self._process, self._usual, self._model = process, usual, model
        self._account: list[str] = []
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait until all is written, but no longer than this: some other process may hold the pipe
        open.
        """
        self._thread.join(seconds)

    def _run(self) -> None:
        arrival = select.poll()
        arrival.register(self._descriptor, select.POLLIN)
        data, cutter = b"-", LineCutter()
        while data:
            if self._account and not arrival.poll(_TOGETHER_SECONDS * 1000):
                self._end_account()
            data = os.read(self._descriptor, 1 << 16)
            for line in cutter.push(data):
                self._take(line)
        self._end_account()
        os.close(self._descriptor)

    def _take(self, line: str) -> None:
        record = logging.read_relayed(line)
        if record is not None:
            self._end_account()
            logging.write(replace(record, model=record.model or self._model))
        elif logging.settings().format != "json":
            logging.write_text(line)  # as it would look without us
        elif self._account or _ALARM.match(line):
            self._account.append(line)
            if len(self._account) >= _MOST_LINES:
                self._end_account()
        elif mark := _LEVEL_MARK.match(line):
            self._write("W" if mark[1] == "WARNING" else "I", line[mark.end() :])
        elif line.strip():
            self._write(self._usual, line)

    def _end_account(self) -> None:
        if self._account:
            self._write("E", "\n".join(self._account).strip())
            self._account = []

    def _write(self, level: logging.Level, text: str) -> None:
        logging.write(logging.Record(level, text, process=self._process, model=self._model))


@contextmanager
def one_log() -> Iterator[None]:
    """Within, all that this process prints is part of the log; in the format json even what is not
    Python's.
    """
    with ExitStack() as stack:
        if logging.settings().format == "json":
            stack.enter_context(_own_streams())
            sys.excepthook = _uncaught  # for good: what nobody catches passes here on its way there
        stack.enter_context(told_by_python())
        if logging.settings().format == "json":
            # what is found to be wrong with things as they go is said before the end
            stack.callback(gc.collect)
        yield


@contextmanager
def _own_streams() -> Iterator[None]:
    """The descriptors 1 and 2 lead to us, for all who write there, and the log to where 2 led
    before.
    """
    with ExitStack() as stack:
        kept = open(os.dup(2), "w", encoding="utf-8", errors=logging.UNWRITABLE)  # noqa: SIM115
        stack.callback(_close, kept)
        stack.enter_context(_crashes_told(kept))
        logging.write_to(kept)
        stack.callback(logging.write_to, None)
        stack.enter_context(_redirected(1, sys.stdout, "I"))
        stack.enter_context(_redirected(2, sys.stderr, "W"))
        yield


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # lines that could not be written are tried once more
        stream.close()


@contextmanager
def _crashes_told(stream: TextIO) -> Iterator[None]:
    """The stack of a crash of this process goes there at once: who reads our pipes ends with the
    process.
    """
    before = faulthandler.is_enabled()
    faulthandler.enable(file=stream)
    try:
        yield
    finally:
        if before:
            faulthandler.enable()
        else:
            faulthandler.disable()


@contextmanager
def _redirected(descriptor: int, stream: TextIO, usual: logging.Level) -> Iterator[None]:
    stream.flush()
    before = os.dup(descriptor)
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # a user has only so much of it
            # Native code that prints while it holds the interpreter's lock keeps the reader from
            # reading.
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.dup2(writing, descriptor)
    os.close(writing)
    relay = Relay(reading, os.getpid(), usual)
    try:
        yield
    finally:
        stream.flush()
        os.dup2(before, descriptor)
        os.close(before)
        relay.finish(1.0)


class _Handler(standard_logging.Handler):
    """Libraries speak through Python's own logging: uvicorn, asyncio."""

    def emit(self, record: standard_logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
            place = f"{record.filename}:{record.lineno}"
            level = _LEVELS.get(
                record.levelno, "E" if record.levelno > standard_logging.WARNING else "I"
            )
            logging.write(logging.Record(level, text, place))
        except (
            Exception
        ):  # of any kind: words that do not fit their arguments must not end who says them
            self.handleError(record)


@contextmanager
def told_by_python() -> Iterator[None]:
    """Warnings, the log lines of libraries, and exceptions that nobody catches, as records."""
    handler, root = _Handler(), standard_logging.getLogger()
    before = warnings.showwarning, threading.excepthook, sys.unraisablehook
    root.addHandler(handler)
    warnings.showwarning = _show_warning
    threading.excepthook = _thread_failed
    sys.unraisablehook = _not_raised
    try:
        yield
    finally:
        warnings.showwarning, threading.excepthook, sys.unraisablehook = before
        root.removeHandler(handler)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.warning(f"{category.__name__}: {message}", f"{os.path.basename(filename)}:{lineno}")


def _thread_failed(given: threading.ExceptHookArgs) -> None:
    if given.exc_type is not SystemExit:
        name = given.thread.name if given.thread is not None else "unknown"
        logging.error(
            f"exception in thread {name}:\n{_trace(given.exc_type, given.exc_value, given.exc_traceback)}"
        )


def _uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    logging.say("E", f"the server failed:\n{_trace(kind, error, where)}")


def _not_raised(given: Any) -> None:
    said = given.err_msg or "exception ignored in"
    logging.error(
        f"{said} {given.object!r}:\n{_trace(given.exc_type, given.exc_value, given.exc_traceback)}"
    )


def _trace(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> str:
    return "".join(traceback.format_exception(kind, error, where)).rstrip()
