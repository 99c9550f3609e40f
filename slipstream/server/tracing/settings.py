"""Trace settings, global and for single models: kept, checked and shown as Triton does, and who is
traced by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.otlp import SpanExporter
from slipstream.server.tracing.spans import SpanTraces
from slipstream.server.tracing.tracing import (
    TENSORS,
    TEXT_COMPLETION,
    FileTraces,
    Headers,
    RequestTrace,
    TraceFile,
    Traces,
    Turn,
)

Value = str | list[str]
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
DEFAULTS: Mapping[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
FILE_SETTINGS = ("log_frequency", "trace_file")


class TraceSettings:
    """`start`: what the command line says. `export`: traces go to a collector, not to files.
    `begin` is asked at every request.
    """

    def __init__(
        self, start: Mapping[str, Value] | None = None, export: ExportSettings | None = None
    ) -> None:
        self._start: dict[str, Value] = {**DEFAULTS, **(start or {})}
        self._shown_export: dict[str, Value] = {}
        self.exporter: SpanExporter | None = None
        if export is not None:
            self._start["trace_mode"] = "opentelemetry"
            self._shown_export = dict(export.shown())
            self.exporter = SpanExporter(export)
        self._changed: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}
        self._file = TraceFile(Path(str(self._start["trace_file"])))
        self._ids = itertools.count(1)
        # by model; "" is for those without settings of their own
        self._traces: dict[str, Traces | None] = {}
        self._check_usable(self._start, starting=True)
        self._active = _is_on(self._start)  # somebody may be traced

    def begin(
        self, model: str, headers: Headers = (), operation: str = TEXT_COMPLETION
    ) -> RequestTrace | None:
        """The trace of a request that has just come; its `finish` must be called.

        `operation`: what a model of language is asked for, in the words of OpenTelemetry's
        conventions.
        """
        if not self._active:
            return None
        scope = model if model in self._models else ""
        if scope not in self._traces:
            self._traces[scope] = self._traces_by(self.get(model))
        traces = self._traces[scope]
        return traces.next(headers, operation) if traces is not None else None

    def get(self, model: str = "") -> dict[str, Value]:
        """The settings in force for a model, or for all models that have none of their own."""
        shown = {**self._start, **self._changed, **self._left("")}
        if model in self._models:
            shown |= self._models[model] | self._left(model)
        if self.exporter is not None:
            shown = {
                name: value for name, value in shown.items() if name not in FILE_SETTINGS
            } | self._shown_export
        return shown

    def _left(self, scope: str) -> dict[str, Value]:
        """What is left of a count that has been drawn from."""
        traces = self._traces.get(scope)
        return {"trace_count": str(traces.left)} if traces is not None else {}

    def update(self, wanted: Mapping[str, Any], model: str = "") -> dict[str, Value]:
        """Change some; None takes a change back; names nobody knows are ignored, as with Triton."""
        changes = {
            name: _checked(name, value) for name, value in wanted.items() if name in DEFAULTS
        }
        if self.exporter is not None and changes.get("log_frequency") is not None:
            raise _invalid("the mode opentelemetry has no log_frequency")
        target = dict(self._models.get(model, {}) if model else self._changed)
        target |= self._left(model)  # what is used up stays used up
        for name, value in changes.items():
            if value is None:
                target.pop(name, None)
            else:
                target[name] = value
        self._check_usable({**self._start, **(self.get() if model else {}), **target})
        if model:
            self._models[model] = target
        else:
            self._changed = target
        self._begin_anew([model] if model else list(self._traces))
        return self.get(model)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)
        self._begin_anew([model])

    def close(self) -> None:
        """Write what has been collected. May take as long as a collector is given."""
        self._begin_anew(list(self._traces))
        if self.exporter is not None:
            self.exporter.close()

    def _begin_anew(self, scopes: list[str]) -> None:
        for scope in scopes:
            if (traces := self._traces.pop(scope, None)) is not None:
                traces.flush()
        self._active = any(_is_on(self.get(model)) for model in ("", *self._models))

    def _traces_by(self, settings: Mapping[str, Value]) -> Traces | None:
        if not _is_on(settings):
            return None
        turn = Turn(int(str(settings["trace_rate"])), int(str(settings["trace_count"])))
        if self.exporter is not None:
            return SpanTraces(self.exporter.add, turn, self._ids)
        return FileTraces(
            self._file,
            settings["trace_level"],
            turn,
            int(str(settings["log_frequency"])),
            self._ids,
        )

    def _check_usable(self, settings: Mapping[str, Value], starting: bool = False) -> None:
        """A server that starts with a rate of 0 traces the requests that callers have put into a
        trace, only those.
        """
        if not _is_on(settings):
            return
        reason, rate = None, int(str(settings["trace_rate"]))
        if self.exporter is not None and TENSORS in settings["trace_level"]:
            reason = "the mode opentelemetry has no level TENSORS, only TIMESTAMPS"
        elif rate == 0 and not (starting and self.exporter is not None):
            reason = "sample rate must be non-zero"
        elif rate < 0:
            reason = "sample rate must be positive"
        elif self.exporter is None and not settings["trace_file"]:
            reason = "trace file name is not given"
        elif settings["trace_count"] == "0":
            reason = ""  # Triton's reason too
        if reason is not None:
            raise _invalid(reason)


def _invalid(reason: str) -> InferenceError:
    return InferenceError(f"Attempting to set invalid trace setting :{reason}")


def _is_on(settings: Mapping[str, Value]) -> bool:
    return "OFF" not in settings["trace_level"]


def _checked(name: str, value: Any) -> Value | None:
    if value is None:
        return None
    if name == "trace_file":
        raise InferenceError(
            "trace file location can not be updated through network protocol", Code.UNSUPPORTED
        )
    if name == "trace_mode":
        raise InferenceError(
            "trace mode can not be updated through network protocol", Code.UNSUPPORTED
        )
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
        raise InferenceError(
            f"Unable to parse '{name}', value is out of range [ 0, {2**31 - 1} ], got: {text}"
        )
    return str(number)


def _levels(values: list[Any]) -> list[str]:
    """Words nobody knows count for nothing, and nothing is OFF."""
    if any(not isinstance(value, str) for value in values):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    known = [value for value in values if value in LEVELS and value != "OFF"]
    return known or ["OFF"]
