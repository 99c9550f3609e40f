"""Formatters for log lines: Triton's text, JSON objects, and records relayed between processes.

Triton's text format, which existing scripts parse:

I1115 22:01:25.210518 1175 http_server.cc:4692] Started HTTPService at 127.0.0.1:8000

A call may pass these attributes in `extra`:

- `place`: the source file and line to show instead of the caller's, for lines that copy Triton's.
- `model` and `request_id`: what the line is about. JSON lines contain them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Annotated, Literal

import msgspec

FORMATS = ("default", "ISO8601", "json")
# the format that a child process writes for the server that reads its output
RELAYED = "relayed"

LevelName = Literal["debug", "info", "warning", "error"]
_LEVEL_NUMBERS: dict[LevelName, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# Triton writes verbose lines with the letter of informational ones.
_LETTERS: dict[LevelName, str] = {"debug": "I", "info": "I", "warning": "W", "error": "E"}
_TRACEBACK = "Traceback (most recent call last):"
_RELAY_MARK = "\x1e"
# the attribute of an exception that holds the model and request id it came from
_ERROR_CONTEXT = "_slipstream_log_context"


def level_name(level: int) -> LevelName:
    """Return the name of one of Triton's four severities for a level of `logging`."""
    if level > logging.WARNING:
        return "error"
    if level == logging.WARNING:
        return "warning"
    return "info" if level >= logging.INFO else "debug"


def make_record(
    level: int,
    text: str,
    *,
    place: str = "",
    time_us: int | None = None,
    process: int | None = None,
    model: str = "",
    request_id: str = "",
) -> logging.LogRecord:
    """Build a record that does not come from a call in this process's source code."""
    fields: dict[str, object] = {
        "name": "slipstream",
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": text,
        "place": place,
        "model": model,
        "request_id": request_id,
    }
    if time_us is not None:
        fields["created"] = time_us / 1_000_000
    if process is not None:
        fields["process"] = process
    return logging.makeLogRecord(fields)


def set_error_context(error: BaseException, model: str, request_id: str) -> None:
    """Attach the request to an exception, for the log line written where it is caught.

    The first call wins: it is closest to where the error was raised.
    """
    if not hasattr(error, _ERROR_CONTEXT):
        setattr(error, _ERROR_CONTEXT, (model, request_id))


def add_error_context(record: logging.LogRecord) -> bool:
    """Copy the request of the exception being handled into a record that names no model.

    This is a filter for a handler. It drops no record.
    """
    if not getattr(record, "model", ""):
        error = record.exc_info[1] if record.exc_info else sys.exception()
        context = getattr(error, _ERROR_CONTEXT, None)
        if context is not None:
            record.model, record.request_id = context
    return True


def _place(record: logging.LogRecord) -> str:
    place = getattr(record, "place", None)
    return f"{record.filename}:{record.lineno}" if place is None else str(place)


def _time_us(record: logging.LogRecord) -> int:
    return round(record.created * 1_000_000)


def _utc(time_us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_us // 1_000_000))


class TritonFormatter(logging.Formatter):
    """Writes Triton's default format, with local time and microseconds."""

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS[level_name(record.levelno)]
        seconds, microseconds = divmod(_time_us(record), 1_000_000)
        stamp = f"{time.strftime('%m%d %H:%M:%S', time.localtime(seconds))}.{microseconds:06d}"
        return f"{letter}{stamp} {record.process} {_place(record)}] {super().format(record)}"


class Iso8601Formatter(logging.Formatter):
    """Writes Triton's ISO8601 format, with UTC and whole seconds."""

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS[level_name(record.levelno)]
        stamp = f"{_utc(_time_us(record))}Z"
        return f"{stamp} {letter} {record.process} {_place(record)}] {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """Writes one JSON object on one line. Unknown values are left out."""

    def format(self, record: logging.LogRecord) -> str:
        message, error = _split_traceback(super().format(record))
        time_us = _time_us(record)
        line = {
            "time": f"{_utc(time_us)}.{time_us % 1_000_000:06d}Z",
            "level": level_name(record.levelno),
            "message": message,
            "model": getattr(record, "model", ""),
            "request_id": getattr(record, "request_id", ""),
            "error": error,
            "process": record.process,
            "place": _place(record),
        }
        return json.dumps(
            {name: value for name, value in line.items() if value or name == "message"}
        )


def _split_traceback(text: str) -> tuple[str, str]:
    """Split text into the message and the traceback after it.

    A traceback without a message gets its last line as the message.
    """
    message, mark, trace = text.partition(_TRACEBACK)
    if mark:
        message = message.strip().removesuffix(":") or trace.strip().rpartition("\n")[2]
    return message.strip("\n"), (mark + trace).rstrip()


class _Relayed(msgspec.Struct, forbid_unknown_fields=True):
    """A record as a child process writes it."""

    level: LevelName
    message: str
    place: str
    time_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
    process: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    model: str
    request_id: str


class RelayFormatter(logging.Formatter):
    """Writes a whole record on one line that starts with a mark which no other output contains."""

    def format(self, record: logging.LogRecord) -> str:
        relayed = _Relayed(
            level=level_name(record.levelno),
            message=super().format(record),
            place=_place(record),
            time_us=_time_us(record),
            process=record.process or 0,
            model=getattr(record, "model", ""),
            request_id=getattr(record, "request_id", ""),
        )
        # json and not msgspec: it escapes lone surrogates, which names of files may contain
        return _RELAY_MARK + json.dumps(msgspec.to_builtins(relayed))


def read_relayed(line: str) -> logging.LogRecord | None:
    """Return the record in a line of a child's output, or None when the line is not a record.

    Any process can write to the pipe, and writes of two processes can mix in one line. The caller
    shows such a line unchanged.
    """
    if not line.startswith(_RELAY_MARK):
        return None
    try:
        relayed = msgspec.convert(json.loads(line.removeprefix(_RELAY_MARK)), _Relayed)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return make_record(
        _LEVEL_NUMBERS[relayed.level],
        relayed.message,
        place=relayed.place,
        time_us=relayed.time_us,
        process=relayed.process,
        model=relayed.model,
        request_id=relayed.request_id,
    )


def make_formatter(name: str) -> logging.Formatter:
    """Return the formatter of one of FORMATS, or of RELAYED."""
    formatters: dict[str, type[logging.Formatter]] = {
        "default": TritonFormatter,
        "ISO8601": Iso8601Formatter,
        "json": JsonFormatter,
        RELAYED: RelayFormatter,
    }
    return formatters[name]()
