"""The log settings that clients may read and change while the server runs.

HTTP serves them at `/v2/logging`, gRPC in the call LogSettings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.log.formats import FORMATS
from slipstream.server.log.output import HANDLER, configure_log

SWITCHES = ("log_info", "log_warning", "log_error")


class _Type(NamedTuple):
    kind: type
    name: str  # in the errors of gRPC


_TYPES = {
    **dict.fromkeys(SWITCHES, _Type(bool, "boolean")),
    "log_verbose_level": _Type(int, "int32"),
    "log_format": _Type(str, "string"),
}


def log_settings() -> dict[str, str | bool | int]:
    """Return all log settings, in Triton's order."""
    current = HANDLER.settings
    return {
        "log_file": current.file,
        "log_info": current.info,
        "log_warning": current.warning,
        "log_error": current.error,
        "log_verbose_level": current.verbose_level,
        "log_format": current.format,
    }


def update_log_settings(requested: Mapping[str, Any]) -> dict[str, str | bool | int]:
    """Change some settings and return all.

    Like Triton, ignore unknown names and keep the settings whose value is None.
    """
    changes: dict[str, Any] = {}
    for name in ("log_file", *SWITCHES, "log_verbose_level", "log_format"):
        value = requested.get(name)
        if value is not None:
            changes[name.removeprefix("log_")] = _checked(name, value)
    configure_log(**changes)
    return log_settings()


def check_setting_types(types: Mapping[str, type | None]) -> None:
    """Raise InferenceError, in the words of gRPC, for a setting of the wrong type or of none."""
    for name, kind in types.items():
        if name == "log_file":
            raise _fixed_file()
        expected = _TYPES.get(name)
        if expected is not None and kind is not expected.kind:
            raise InferenceError(f"expect {expected.name} for '{name}'")


def check_format(value: str) -> None:
    """Raise InferenceError, in the words of gRPC, for an unknown format."""
    if value not in FORMATS:
        raise InferenceError(f"invalid argument for log_format, got: {value}")


def _fixed_file() -> InferenceError:
    return InferenceError(
        "log file location can not be updated through network protocol", Code.UNSUPPORTED
    )


def _checked(name: str, value: Any) -> Any:
    if name == "log_file":
        raise _fixed_file()
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise InferenceError("attempt to access JSON non-boolean as boolean", Code.INTERNAL)
        return value
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value < 2**64:
            raise InferenceError(
                "attempt to access JSON non-unsigned-integer as unsigned-integer", Code.INTERNAL
            )
        return value % 2**32  # the type of the level in Triton
    if not isinstance(value, str):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    if value not in FORMATS:
        raise InferenceError(f"invalid argument for --log_format, got: {value}", Code.UNAVAILABLE)
    return value
