"""One small logger that writes Triton's line form, which people's scripts already read.

I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal, TextIO

Level = Literal["I", "W", "E"]


def format_line(level: Level, place: str, message: str, now_ns: int, process_id: int) -> str:
    moment = time.localtime(now_ns // 1_000_000_000)
    microseconds = now_ns // 1000 % 1_000_000
    stamp = time.strftime("%m%d %H:%M:%S", moment)
    return f"{level}{stamp}.{microseconds:06d} {process_id} {place}] {message}"


def info(message: str, place: str | None = None) -> None:
    """`place` stands in for the caller's file and line where scripts look for Triton's own."""
    _write("I", message, place)


def warning(message: str, place: str | None = None) -> None:
    _write("W", message, place)


def error(message: str, place: str | None = None) -> None:
    _write("E", message, place)


def _write(level: Level, message: str, place: str | None) -> None:
    if place is None:
        caller = sys._getframe(2)
        place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    stream: TextIO = sys.stderr
    print(format_line(level, place, message, time.time_ns(), os.getpid()), file=stream, flush=True)
