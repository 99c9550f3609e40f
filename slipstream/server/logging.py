"""One small logger that writes Triton's line form, which people's scripts already read.

I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

Level = Literal["I", "W", "E"]
FORMATS = ("default", "ISO8601")


@dataclass(frozen=True)
class LogSettings:
    file: str = ""  # empty: the standard error stream
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"


_settings = LogSettings()
_file: TextIO | None = None


def settings() -> LogSettings:
    return _settings


def configure(**changes: Any) -> None:
    """Change settings (fields of LogSettings). A new file is opened to append to; OSError when it cannot be."""
    global _settings, _file
    changed = replace(_settings, **changes)
    if changed.file != _settings.file:
        opened = open(changed.file, "a", encoding="utf-8") if changed.file else None  # noqa: SIM115
        if _file is not None:
            _file.close()
        _file = opened
    _settings = changed


def format_line(
    level: Level, place: str, message: str, now_ns: int, process_id: int, layout: str = "default"
) -> str:
    moment = time.localtime(now_ns // 1_000_000_000)
    microseconds = now_ns // 1000 % 1_000_000
    if layout == "ISO8601":
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_ns // 1_000_000_000))
        return f"{stamp} {level} {process_id} {place}] {message}"
    stamp = time.strftime("%m%d %H:%M:%S", moment)
    return f"{level}{stamp}.{microseconds:06d} {process_id} {place}] {message}"


def info(message: str, place: str | None = None) -> None:
    """`place` stands in for the caller's file and line where scripts look for Triton's own."""
    if _settings.info:
        _write("I", message, place)


def verbose(level: int, message: str, place: str | None = None) -> None:
    """Said only from that verbosity on; the letter is I, as Triton's is."""
    if _settings.verbose_level >= level:
        _write("I", message, place)


def warning(message: str, place: str | None = None) -> None:
    if _settings.warning:
        _write("W", message, place)


def error(message: str, place: str | None = None) -> None:
    if _settings.error:
        _write("E", message, place)


def _write(level: Level, message: str, place: str | None) -> None:
    if place is None:
        caller = sys._getframe(2)
        place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    stream: TextIO = _file or sys.stderr
    line = format_line(level, place, message, time.time_ns(), os.getpid(), _settings.format)
    print(line, file=stream, flush=True)
