"""Captures other output of the server's processes as log lines: prints, warnings, crashes."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import logging
import os
import re
import select
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from slipstream.server.log.formats import make_record, read_relayed
from slipstream.server.log.output import ENCODING_ERRORS, HANDLER

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 16
_MAX_REPORT_LINES = 1000
_REPORT_GAP_SECONDS = 0.05  # silence that ends an error report
_PIPE_BYTES = 1 << 20
# the first line of an error report; the lines that follow it closely belong to the same record
_REPORT_START = re.compile(
    r"Traceback |Fatal |terminate called|Thread 0x|Current thread|(\w+ - )?(ERROR|error)\b|E\d{4} "
)
_LEVEL_MARK = re.compile(r"\[(INFO|WARNING)\] ")  # start of a line that our own commands print


class LineSplitter:
    """Splits a stream of bytes into lines.

    A line longer than MAX_LINE_BYTES is returned in pieces, because it might never end.
    """

    def __init__(self) -> None:
        self._partial = bytearray()

    def push(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes. Empty data means the end of the stream."""
        if not data:
            return [self._take()] if self._partial else []
        lines: list[str] = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            lines += self._append(part)
            lines.append(self._take())
        return lines + self._append(rest)

    def _append(self, part: bytes) -> list[str]:
        """Add to the partial line and return the pieces that exceed the limit."""
        self._partial += part
        pieces = []
        while len(self._partial) > MAX_LINE_BYTES:
            size = self._piece_bytes()
            pieces.append(self._partial[:size].decode("utf-8", "replace"))
            del self._partial[:size]
        return pieces

    def _piece_bytes(self) -> int:
        """Return the largest size up to MAX_LINE_BYTES that does not split a character."""
        # The bytes 10xxxxxx continue a character, which has at most three of them.
        for size in range(MAX_LINE_BYTES, MAX_LINE_BYTES - 4, -1):
            if self._partial[size] & 0xC0 != 0x80:
                return size
        return MAX_LINE_BYTES

    def _take(self) -> str:
        text = self._partial.decode("utf-8", "replace").rstrip("\r")
        self._partial.clear()
        return text


class Relay:
    """Copies the output of a process from a pipe to the log, in a thread, until the pipe ends.

    Records that the process relays are written in the server's format. Other lines are written as
    they are, or as JSON records with the level `default_level`.
    """

    def __init__(
        self,
        descriptor: int,
        process: int,
        default_level: int,
        model: str = "",
        prefix: str = "",
    ) -> None:
        """prefix: begins every line and names the process among others of its kind"""
        self._prefix = prefix
        self._descriptor = descriptor
        self._process = process
        self._default_level = default_level
        self._model = model
        self._report: list[str] = []
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait until all output is written, or for this long: another process may hold the pipe."""
        self._thread.join(seconds)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        splitter = LineSplitter()
        data = b"-"
        while data:
            if self._report and not poll.poll(_REPORT_GAP_SECONDS * 1000):
                self._end_report()
            data = os.read(self._descriptor, 1 << 16)
            for line in splitter.push(data):
                self._take(line)
        self._end_report()
        os.close(self._descriptor)

    def _take(self, line: str) -> None:
        record = read_relayed(line)
        if record is not None:
            self._end_report()
            record.model = getattr(record, "model", "") or self._model
            if self._prefix:
                record.msg = f"{self._prefix}{record.getMessage()}"
                record.args = None
            _handle(record)
        elif HANDLER.settings.format != "json":
            HANDLER.write_line(f"{self._prefix}{line}")
        elif self._report or _REPORT_START.match(line):
            self._report.append(line)
            if len(self._report) >= _MAX_REPORT_LINES:
                self._end_report()
        elif mark := _LEVEL_MARK.match(line):
            level = logging.WARNING if mark[1] == "WARNING" else logging.INFO
            self._write(level, line[mark.end() :])
        elif line.strip():
            self._write(self._default_level, line)

    def _end_report(self) -> None:
        if self._report:
            self._write(logging.ERROR, "\n".join(self._report).strip())
            self._report = []

    def _write(self, level: int, text: str) -> None:
        text = f"{self._prefix}{text}"
        _handle(make_record(level, text, process=self._process, model=self._model))


def _handle(record: logging.LogRecord) -> None:
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


@contextmanager
def capture_output() -> Iterator[None]:
    """Send everything that this process reports to the log.

    In the JSON format this includes what native libraries and child processes print.
    """
    with ExitStack() as stack:
        if HANDLER.settings.format == "json":
            stack.enter_context(_capture_descriptors())
            # Never undone: an uncaught exception reaches the hook after this context has ended.
            sys.excepthook = _log_uncaught
        stack.enter_context(capture_python_reports())
        if HANDLER.settings.format == "json":
            # Report errors of finalizers while they can still be logged.
            stack.callback(gc.collect)
        yield


@contextmanager
def _capture_descriptors() -> Iterator[None]:
    """Read what is written to descriptors 1 and 2; write the log to the original descriptor 2."""
    with ExitStack() as stack:
        stderr = open(os.dup(2), "w", encoding="utf-8", errors=ENCODING_ERRORS)  # noqa: SIM115
        stack.callback(_close, stderr)
        stack.enter_context(_show_crashes(stderr))
        HANDLER.set_stream(stderr)
        stack.callback(HANDLER.set_stream, None)
        stack.enter_context(_redirect(1, sys.stdout, logging.INFO))
        stack.enter_context(_redirect(2, sys.stderr, logging.WARNING))
        yield


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # closing writes the lines that could not be written before
        stream.close()


@contextmanager
def _show_crashes(stream: TextIO) -> Iterator[None]:
    """Write the stack of a crash directly to `stream`: the thread that reads our pipes has died."""
    enabled_before = faulthandler.is_enabled()
    faulthandler.enable(file=stream)
    try:
        yield
    finally:
        if enabled_before:
            faulthandler.enable()
        else:
            faulthandler.disable()


@contextmanager
def _redirect(descriptor: int, stream: TextIO, default_level: int) -> Iterator[None]:
    """Write to the log what any code in this process writes to a descriptor."""
    stream.flush()
    original = os.dup(descriptor)
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # the kernel limits the pipe memory of a user
            # Native code that prints while it holds the interpreter's lock stops the reader. A
            # small pipe would then block it forever.
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.dup2(writing, descriptor)
    os.close(writing)
    relay = Relay(reading, os.getpid(), default_level)
    try:
        yield
    finally:
        stream.flush()
        os.dup2(original, descriptor)
        os.close(original)
        relay.finish(1.0)


@contextmanager
def capture_python_reports() -> Iterator[None]:
    """Log warnings, exceptions that end a thread, and exceptions that Python ignores."""
    show_warning = warnings.showwarning
    thread_hook = threading.excepthook
    unraisable_hook = sys.unraisablehook
    warnings.showwarning = _log_warning
    threading.excepthook = _log_thread_failure
    sys.unraisablehook = _log_unraisable
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        threading.excepthook = thread_hook
        sys.unraisablehook = unraisable_hook


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    place = f"{os.path.basename(filename)}:{lineno}"
    logger.warning("%s: %s", category.__name__, message, extra={"place": place})


def _log_thread_failure(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is not SystemExit:
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        logger.error("exception in thread %s:", name, exc_info=arguments.exc_value)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    report = logging.Formatter().formatException((kind, error, trace))
    HANDLER.write_console(logging.ERROR, f"the server failed:\n{report}")


def _log_unraisable(arguments: sys.UnraisableHookArgs) -> None:
    text = arguments.err_msg or "exception ignored in"
    logger.error("%s %r:", text, arguments.object, exc_info=arguments.exc_value)
