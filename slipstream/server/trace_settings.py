"""Trace settings, global and for single models: kept, checked and shown as Triton does, and who is traced by them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.server.errors import Code, InferenceError
from slipstream.server.tracing import RequestTrace, Sampler, TraceFile

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
    """`start`: what the command line says. `begin` is asked at every request."""

    def __init__(self, start: Mapping[str, Value] | None = None) -> None:
        self._start: dict[str, Value] = {**DEFAULTS, **(start or {})}
        self._changed: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}
        self._file = TraceFile(Path(str(self._start["trace_file"])))
        self._ids = itertools.count(1)
        self._samplers: dict[str, Sampler | None] = {}  # by model; "" is for those without settings of their own
        self._check_usable(self._start)
        self._active = _is_on(self._start)  # somebody may be traced

    def begin(self, model: str) -> RequestTrace | None:
        """The trace of a request that has just come; its `finish` must be called."""
        if not self._active:
            return None
        scope = model if model in self._models else ""
        if scope not in self._samplers:
            self._samplers[scope] = self._sampler(self.get(model))
        sampler = self._samplers[scope]
        return sampler.next() if sampler is not None else None

    def get(self, model: str = "") -> dict[str, Value]:
        """The settings in force for a model, or for all models that have none of their own."""
        shown = {**self._start, **self._changed, **self._left("")}
        return shown | self._models[model] | self._left(model) if model in self._models else shown

    def _left(self, scope: str) -> dict[str, Value]:
        """What is left of a count that has been drawn from."""
        sampler = self._samplers.get(scope)
        return {"trace_count": str(sampler.left)} if sampler is not None else {}

    def update(self, wanted: Mapping[str, Any], model: str = "") -> dict[str, Value]:
        """Change some; None takes a change back; names nobody knows are ignored, as with Triton."""
        changes = {name: _checked(name, value) for name, value in wanted.items() if name in DEFAULTS}
        target = dict(self._models.get(model, {}) if model else self._changed)
        target |= self._left(model)  # what is used up stays used up
        for name, value in changes.items():
            if value is None:
                target.pop(name, None)
            else:
                target[name] = value
        self._check_usable({**(self.get() if model else self._start), **target})
        if model:
            self._models[model] = target
        else:
            self._changed = target
        self._begin_anew([model] if model else list(self._samplers))
        return self.get(model)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)
        self._begin_anew([model])

    def close(self) -> None:
        """Write what has been collected."""
        self._begin_anew(list(self._samplers))

    def _begin_anew(self, scopes: list[str]) -> None:
        for scope in scopes:
            if (sampler := self._samplers.pop(scope, None)) is not None:
                sampler.flush()
        self._active = any(_is_on(self.get(model)) for model in ("", *self._models))

    def _sampler(self, settings: Mapping[str, Value]) -> Sampler | None:
        if not _is_on(settings):
            return None
        rate, count, frequency = (int(str(settings[name])) for name in NUMBERS)
        return Sampler(self._file, settings["trace_level"], rate, count, frequency, self._ids)

    def _check_usable(self, settings: Mapping[str, Value]) -> None:
        if not _is_on(settings):
            return
        reason = None
        if int(str(settings["trace_rate"])) <= 0:
            reason = "sample rate must be positive"
        elif not settings["trace_file"]:
            reason = "trace file name is not given"
        elif settings["trace_count"] == "0":
            reason = ""  # Triton's reason too
        if reason is not None:
            raise InferenceError(f"Attempting to set invalid trace setting :{reason}")


def _is_on(settings: Mapping[str, Value]) -> bool:
    return "OFF" not in settings["trace_level"]


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
