"""One small logger. Its lines have Triton's form, which people's scripts already read, or are JSON
objects.

I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

Level = Literal["I", "W", "E", "V"]  # V, for verbose, looks like I in Triton's lines
FORMATS = ("default", "ISO8601", "json")
# how a process whose output the server reads writes its own lines: see `as_relayed`
RELAYED = "relayed"
LEVEL_NAMES: dict[Level, str] = {"I": "info", "W": "warning", "E": "error", "V": "debug"}
# how text that is not Unicode is written, such as some names of files
UNWRITABLE = "backslashreplace"
_TRACEBACK = "Traceback (most recent call last):"
_RELAY_MARK = "\x1e"
_CONCERN = "_slipstream_concern"  # what an exception is about, where somebody on its way knew


@dataclass(frozen=True)
class LogSettings:
    file: str = ""  # empty: the standard error stream
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"


@dataclass(frozen=True)
class Record:
    """One thing that is said. A message may end in a traceback. `model` and `request_id` are empty
    where unknown.
    """

    level: Level
    message: str
    place: str = ""
    time_ns: int = field(default_factory=time.time_ns)
    process: int = field(default_factory=os.getpid)
    model: str = ""
    request_id: str = ""


_settings = LogSettings()
_file: TextIO | None = None
_stream: TextIO | None = None  # in place of the standard error stream
_writing = threading.RLock()  # lines come from several threads and must not mix


def settings() -> LogSettings:
    return _settings


def configure(**changes: Any) -> None:
    """Change settings (fields of LogSettings). A new file is opened to append to; OSError when it
    cannot be.
    """
    global _settings, _file
    with _writing:
        changed = replace(_settings, **changes)
        if changed.file != _settings.file:
            opened = (
                open(changed.file, "a", encoding="utf-8", errors=UNWRITABLE)  # noqa: SIM115
                if changed.file
                else None
            )
            if _file is not None:
                with suppress(OSError):  # its disk may be full, which is why there is a new one
                    _file.close()
            _file = opened
        _settings = changed


def write_to(stream: TextIO | None) -> None:
    """Where lines go that no file takes; None is the standard error stream."""
    global _stream
    _stream = stream


def format_line(
    level: Level, place: str, message: str, now_ns: int, process_id: int, layout: str = "default"
) -> str:
    letter = "I" if level == "V" else level
    if layout == "ISO8601":
        return f"{_utc(now_ns)}Z {letter} {process_id} {place}] {message}"
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now_ns // 1_000_000_000))
    return f"{letter}{stamp}.{_microseconds(now_ns)} {process_id} {place}] {message}"


def _utc(now_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 1_000_000_000))


def _microseconds(now_ns: int) -> str:
    return f"{now_ns // 1000 % 1_000_000:06d}"


def format_json(record: Record) -> str:
    """One line. What is not known is left out; a traceback is apart from the words before it."""
    message, mark, trace = record.message.partition(_TRACEBACK)
    if mark:
        message = message.strip().removesuffix(":") or trace.strip().rpartition("\n")[2]
    said = {
        "time": f"{_utc(record.time_ns)}.{_microseconds(record.time_ns)}Z",
        "level": LEVEL_NAMES[record.level],
        "message": message.strip("\n"),
        "model": record.model,
        "request_id": record.request_id,
        "error": (mark + trace).rstrip(),
        "process": record.process,
        "place": record.place,
    }
    return json.dumps({name: value for name, value in said.items() if value or name == "message"})


def as_relayed(record: Record) -> str:
    """All of a record, in a line that nobody else writes, for the server to write it in its own
    form.
    """
    return _RELAY_MARK + json.dumps(asdict(record))


def read_relayed(line: str) -> Record | None:
    """None for a line that is no record."""
    if not line.startswith(_RELAY_MARK):
        return None
    try:
        record = Record(**json.loads(line.removeprefix(_RELAY_MARK)))
    except (ValueError, TypeError, RecursionError):
        return None  # two writers at once: somebody's text is amid it, and all of it is to be seen
    return record if _is_sound(record) else None


def _is_sound(record: Record) -> bool:
    """Anybody may have written it; one that cannot be formatted would end whoever reads them."""
    texts = (record.level, record.message, record.place, record.model, record.request_id)
    numbers = (record.time_ns, record.process)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        and record.level in LEVEL_NAMES
    )


def concern(error: BaseException, model: str, request_id: str) -> None:
    """Note what an error is about, for the line that whoever catches it will write. The first to
    know is right.
    """
    if not hasattr(error, _CONCERN):
        setattr(error, _CONCERN, (model, request_id))


def info(message: str, place: str | None = None, model: str = "") -> None:
    """`place` stands in for the caller's file and line where scripts look for Triton's own."""
    _write("I", message, place, model)


def verbose(level: int, message: str, place: str | None = None, model: str = "") -> None:
    """Said only from that verbosity on; the letter is I, as Triton's is."""
    if _settings.verbose_level >= level:
        _write("V", message, place, model)


def warning(message: str, place: str | None = None, model: str = "") -> None:
    _write("W", message, place, model)


def error(message: str, place: str | None = None, model: str = "", request_id: str = "") -> None:
    _write("E", message, place, model, request_id)


def _write(level: Level, message: str, place: str | None, model: str, request_id: str = "") -> None:
    if place is None:
        caller = sys._getframe(2)
        place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    if not model:
        model, request_id = getattr(sys.exception(), _CONCERN, ("", request_id))
    write(Record(level, message, place, model=model, request_id=request_id))


def write(record: Record) -> None:
    """Whoever said it, in this process or another: where and in the form that the settings say, if
    at all.
    """
    wanted = {
        "I": _settings.info,
        "W": _settings.warning,
        "E": _settings.error,
        "V": _settings.verbose_level > 0,
    }
    if wanted[record.level]:
        write_text(_formatted(record))


def write_text(text: str) -> None:
    """A line as it is, where the log goes."""
    with _writing:
        _print(text, _file or _stream or sys.stderr)


def say(level: Level, text: str) -> None:
    """What a command has to say to whoever started it: on the standard error stream, even beside a
    log file.
    """
    with _writing:
        text = format_json(Record(level, text)) if _settings.format == "json" else text
        _print(text, _stream or sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # A full disk, a reader that has gone, a stream that is closed: there is nobody left to tell,
    # and a server that answers without a log is worth more than one that ends for want of it.
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _formatted(record: Record) -> str:
    if _settings.format == "json":
        return format_json(record)
    if _settings.format == RELAYED:
        return as_relayed(record)
    place, message = record.place, record.message
    return format_line(
        record.level, place, message, record.time_ns, record.process, _settings.format
    )
