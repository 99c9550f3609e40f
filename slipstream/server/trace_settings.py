"""Trace settings, global and for single models: kept, checked and shown as Triton does.

Requests are not traced into files by this server; a setting that would ask for it is refused in one line, so that
nobody waits for a file that never comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.server.errors import Code, InferenceError

Value = str | list[str]
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
NUMBERS = ("trace_rate", "trace_count", "log_frequency")
DEFAULTS: Mapping[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


class TraceSettings:
    def __init__(self, start: Mapping[str, Value] | None = None) -> None:
        self._start: dict[str, Value] = {**DEFAULTS, **(start or {})}
        self._changed: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}

    def get(self, model: str = "") -> dict[str, Value]:
        """The settings in force for a model, or for all models that have none of their own."""
        return {**self._start, **self._changed, **self._models.get(model, {})}

    def update(self, wanted: Mapping[str, Any], model: str = "") -> dict[str, Value]:
        """Change some; None takes a change back; names nobody knows are ignored, as with Triton."""
        changes = {name: _checked(name, value) for name, value in wanted.items() if name in DEFAULTS}
        target = dict(self._models.get(model, {}) if model else self._changed)
        for name, value in changes.items():
            if value is None:
                target.pop(name, None)
            else:
                target[name] = value
        self._check_usable({**self._start, **self._changed, **target})
        if model:
            self._models[model] = target
        else:
            self._changed = target
        return self.get(model)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def _check_usable(self, settings: Mapping[str, Value]) -> None:
        if "OFF" in settings["trace_level"]:
            return
        if not settings["trace_file"]:
            raise InferenceError("Attempting to set invalid trace setting :trace file name is not given")
        raise InferenceError("this server does not write traces", Code.UNSUPPORTED)


def _checked(name: str, value: Any) -> Value | None:
    if value is None:
        return None
    if name == "trace_file":
        raise InferenceError("trace file location can not be updated through network protocol", Code.UNSUPPORTED)
    if name == "trace_mode":
        raise InferenceError("trace mode can not be updated through network protocol", Code.UNSUPPORTED)
    if name == "trace_level":
        return _levels(value if isinstance(value, list) else [value])
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, (str, int)) or isinstance(text, bool):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    try:
        number = int(text)
    except ValueError as error:
        raise InferenceError(f"Unable to parse '{name}', got: {text}") from error
    if not -(2**31) <= number < 2**31:
        raise InferenceError(f"Unable to parse '{name}', value is out of range [ 0, {2**31 - 1} ], got: {text}")
    return str(number)


def _levels(values: list[Any]) -> list[str]:
    """Words nobody knows count for nothing, and nothing is OFF."""
    if any(not isinstance(value, str) for value in values):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    known = [value for value in values if value in LEVELS and value != "OFF"]
    return known or ["OFF"]
