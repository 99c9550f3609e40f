"""The one handler of the standard `logging`: the destinations of log lines and their levels.

Modules log through `logging.getLogger(__name__)`. A command calls `configure_log` when it starts,
and clients may change the settings of a running server.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TextIO

from slipstream.server.log.formats import (
    LevelName,
    add_error_context,
    level_name,
    make_formatter,
    make_record,
)

# how text that is not valid Unicode is written, such as some file names
ENCODING_ERRORS = "backslashreplace"
_NO_LEVEL = logging.CRITICAL + 1


@dataclass(frozen=True)
class LogSettings:
    """Triton's log settings. An empty `file` stands for the standard error stream."""

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"

    def enabled(self, level: LevelName) -> bool:
        switches: dict[LevelName, bool] = {
            "debug": self.verbose_level > 0,
            "info": self.info,
            "warning": self.warning,
            "error": self.error,
        }
        return switches[level]

    def threshold(self) -> int:
        """Return the lowest enabled level. Calls below it return before they format anything."""
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            if self.enabled(level_name(level)):
                return level
        return _NO_LEVEL


class LogHandler(logging.Handler):
    """Writes records to the log file or the standard error stream.

    The handler's lock keeps lines of several threads apart. A line is never written to a file that
    another thread has just closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings = LogSettings()
        self._file: TextIO | None = None
        self._stream: TextIO | None = None
        self.setFormatter(make_formatter(self.settings.format))
        self.addFilter(self._enabled)
        self.addFilter(add_error_context)

    def _enabled(self, record: logging.LogRecord) -> bool:
        return self.settings.enabled(level_name(record.levelno))

    def change(self, settings: LogSettings) -> None:
        """Apply settings. Raises OSError when a new log file cannot be opened."""
        self.acquire()
        try:
            if settings.file != self.settings.file:
                opened = _open_log(settings.file) if settings.file else None
                if self._file is not None:
                    with suppress(OSError):  # the old file's disk may be full
                        self._file.close()
                self._file = opened
            self.setFormatter(make_formatter(settings.format))
            self.settings = settings
        finally:
            self.release()

    def set_stream(self, stream: TextIO | None) -> None:
        """Write to this stream instead of the standard error stream; None undoes it."""
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # the arguments do not fit the message: the caller must continue
            self.handleError(record)
            return
        self.write_line(text)

    def write_line(self, text: str) -> None:
        """Write a line to the log as it is."""
        self._print(text, self._file or self._stream or sys.stderr)

    def write_console(self, level: int, text: str) -> None:
        """Write to the standard error stream even when the log goes to a file."""
        if self.settings.format == "json":
            text = self.format(make_record(level, text))
        self._print(text, self._stream or sys.stderr)

    def write_output(self, text: str) -> None:
        """Write to the standard output stream."""
        self._print(text, sys.stdout)

    def _print(self, text: str, stream: TextIO) -> None:
        self.acquire()
        try:
            # A full disk, a closed stream or a missing reader must not stop the server, and there
            # is no other place to report them.
            with suppress(OSError, ValueError):
                print(text, file=stream, flush=True)
        finally:
            self.release()


def _open_log(path: str) -> TextIO:
    return open(path, "a", encoding="utf-8", errors=ENCODING_ERRORS)


HANDLER = LogHandler()


def configure_log(**changes: Any) -> None:
    """Change fields of LogSettings and send the process's log records to HANDLER.

    A log file is appended to. Raises OSError when it cannot be opened.
    """
    settings = replace(HANDLER.settings, **changes)
    HANDLER.change(settings)
    logging.getLogger().addHandler(HANDLER)
    # The root logger keeps its level, WARNING: it is that of the libraries.
    logging.getLogger("slipstream").setLevel(settings.threshold())
