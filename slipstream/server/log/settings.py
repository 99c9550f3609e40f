"""The log settings a client may read and change while the server runs (`/v2/logging` and its gRPC
twin).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.log import log as logging

SWITCHES = ("log_info", "log_warning", "log_error")


def log_settings() -> dict[str, str | bool | int]:
    """All of them, in Triton's order."""
    current = logging.settings()
    return {
        "log_file": current.file,
        "log_info": current.info,
        "log_warning": current.warning,
        "log_error": current.error,
        "log_verbose_level": current.verbose_level,
        "log_format": current.format,
    }


def update_log_settings(wanted: Mapping[str, Any]) -> dict[str, str | bool | int]:
    """Change some; names nobody knows are ignored and None leaves a setting alone, as with Triton."""
    changes: dict[str, Any] = {}
    for name in ("log_file", *SWITCHES, "log_verbose_level", "log_format"):
        value = wanted.get(name)
        if value is not None:
            changes[name.removeprefix("log_")] = _checked(name, value)
    logging.configure(**changes)
    return log_settings()


def _checked(name: str, value: Any) -> Any:
    if name == "log_file":
        raise InferenceError(
            "log file location can not be updated through network protocol", Code.UNSUPPORTED
        )
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise InferenceError("attempt to access JSON non-boolean as boolean", Code.INTERNAL)
        return value
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value < 2**64:
            raise InferenceError(
                "attempt to access JSON non-unsigned-integer as unsigned-integer", Code.INTERNAL
            )
        return value
    if not isinstance(value, str):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    if value not in logging.FORMATS:
        raise InferenceError(
            f"Attempt to set 'log_format' to invalid value '{value}'", Code.UNAVAILABLE
        )
    return value
