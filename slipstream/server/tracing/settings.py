"""Trace settings, global and per model, with Triton's checks and texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import RequestTrace
from slipstream.server.kserve.triton_json import leading_integer
from slipstream.server.tracing.export_settings import ExportSettings
from slipstream.server.tracing.spans import SpanTraces
from slipstream.server.tracing.tracing import (
    TENSORS,
    TEXT_COMPLETION,
    FileTraces,
    Headers,
    RequestSampler,
    TraceFile,
    Traces,
)

if TYPE_CHECKING:
    from slipstream.server.tracing.span_export import SpanExport

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
CHANGEABLE = tuple(name for name in DEFAULTS if name != "trace_mode")  # the mode is ignored
FILE_SETTINGS = ("log_frequency", "trace_file")


class TraceSettings:
    """Decides for each request whether it is traced, and where its trace goes.

    `start`: the settings of the command line. `export`: send spans to a collector, write no files.
    """

    def __init__(
        self, start: Mapping[str, Value] | None = None, export: ExportSettings | None = None
    ) -> None:
        self._start: dict[str, Value] = {**DEFAULTS, **(start or {})}
        self._shown_export: dict[str, Value] = {}
        self.exporter: SpanExport | None = None
        if export is not None:
            self._start["trace_mode"] = "opentelemetry"
            self.exporter = _make_exporter(export)
            self._shown_export = dict(self.exporter.shown())
        self._changed: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}
        self._file = TraceFile(Path(str(self._start["trace_file"])))
        self._ids = itertools.count(1)
        # by model name; "" stands for the models without settings of their own
        self._traces: dict[str, Traces | None] = {}
        self._check_usable(self._start, starting=True)
        self.active = _is_on(self._start)  # at least one model is traced

    def begin(
        self, model: str, headers: Headers = (), operation: str = TEXT_COMPLETION
    ) -> RequestTrace | None:
        """Return the trace of a new request, or None. The caller must call its `finish`.

        `operation`: TEXT_COMPLETION, CHAT or EMBEDDINGS, for the spans of language models.
        """
        if not self.active:
            return None
        scope = model if model in self._models else ""
        if scope not in self._traces:
            self._traces[scope] = self._make_traces(self.get(model))
        traces = self._traces[scope]
        return traces.next(headers, operation) if traces is not None else None

    def get(self, model: str = "") -> dict[str, Value]:
        """Return the settings of a model, or of all models without settings of their own."""
        shown = {**self._start, **self._changed, **self._remaining("")}
        if model in self._models:
            shown |= self._models[model] | self._remaining(model)
        if self.exporter is not None:
            for name in FILE_SETTINGS:
                shown.pop(name, None)
            shown |= self._shown_export
        return shown

    def _remaining(self, scope: str) -> dict[str, Value]:
        """Return the trace count that is left after the requests traced so far."""
        traces = self._traces.get(scope)
        return {"trace_count": str(traces.remaining)} if traces is not None else {}

    def update(self, requested: Mapping[str, Any], model: str = "") -> dict[str, Value]:
        """Change some settings and return all.

        Like Triton, ignore unknown names and undo earlier changes where the value is None.
        """
        changes = {
            name: _check(name, value) for name, value in requested.items() if name in CHANGEABLE
        }
        if self.exporter is not None and changes.get("log_frequency") is not None:
            raise _invalid("the mode opentelemetry has no log_frequency")
        target = dict(self._models.get(model, {}) if model else self._changed)
        target |= self._remaining(model)  # requests traced so far still count
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
        self._restart([model] if model else list(self._traces))
        return self.get(model)

    def forget(self, model: str) -> None:
        self._models.pop(model, None)
        self._restart([model])

    def close(self) -> None:
        """Write the collected traces. May wait for a collector for some seconds."""
        self._restart(list(self._traces))
        if self.exporter is not None:
            self.exporter.close()

    def _restart(self, scopes: list[str]) -> None:
        """Write the collected traces of these models and apply changed settings to new ones."""
        for scope in scopes:
            if (traces := self._traces.pop(scope, None)) is not None:
                traces.flush()
        self.active = any(_is_on(self.get(model)) for model in ("", *self._models))

    def _make_traces(self, settings: Mapping[str, Value]) -> Traces | None:
        if not _is_on(settings):
            return None
        sampler = RequestSampler(
            int(str(settings["trace_rate"])), int(str(settings["trace_count"]))
        )
        if self.exporter is not None:
            return SpanTraces(self.exporter, sampler, self._ids)
        return FileTraces(
            self._file,
            settings["trace_level"],
            sampler,
            int(str(settings["log_frequency"])),
            self._ids,
        )

    def _check_usable(self, settings: Mapping[str, Value], starting: bool = False) -> None:
        """Raise InferenceError for settings that cannot work together.

        A server may start with a rate of 0 in the mode opentelemetry: it then traces only the
        requests that belong to a caller's trace.
        """
        if not _is_on(settings):
            return
        reason = None
        rate = int(str(settings["trace_rate"]))
        if self.exporter is not None and TENSORS in settings["trace_level"]:
            reason = "the mode opentelemetry has no level TENSORS, only TIMESTAMPS"
        elif rate == 0 and not (starting and self.exporter is not None):
            reason = "sample rate must be non-zero"
        elif rate < 0:
            reason = "sample rate must be positive"
        elif self.exporter is None and not settings["trace_file"]:
            reason = "trace file name is not given"
        elif settings["trace_count"] == "0":
            reason = ""  # Triton gives no reason either
        if reason is not None:
            raise _invalid(reason)


def _make_exporter(export: ExportSettings) -> SpanExport:
    try:
        from slipstream.server.tracing.span_export import SpanExport
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise InferenceError(
            "the trace mode opentelemetry needs the OpenTelemetry SDK; "
            "install it with: pip install 'slipstream[otel]'"
        ) from error
    return SpanExport(export)


def _invalid(reason: str) -> InferenceError:
    return InferenceError(f"Attempting to set invalid trace setting :{reason}")


def _is_on(settings: Mapping[str, Value]) -> bool:
    return "OFF" not in settings["trace_level"]


def _check(name: str, value: Any) -> Value | None:
    if name == "trace_file":
        raise InferenceError(
            "trace file location can not be updated through network protocol", Code.UNSUPPORTED
        )
    if value is None:
        return None
    if name == "trace_level":
        if type(value) not in (list, str):  # a JSON object is a subclass of list
            raise InferenceError("attempt to access JSON non-array as array", Code.INTERNAL)
        return _levels([value] if isinstance(value, str) else value)
    # Triton takes only texts
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    return str(_number(name, str(value)))


def _number(name: str, text: str) -> int:
    """Return the value of a setting. Triton keeps it in 32 bits, unsigned except for the count."""
    number = leading_integer(text)
    if number is None:
        raise InferenceError(f"Unable to parse '{name}', got: {text}")
    lowest, highest = (-1, 2**31 - 1) if name == "trace_count" else (0, 2**32 - 1)
    if not -(2**31) <= number <= highest:
        raise InferenceError(
            f"Unable to parse '{name}', value is out of range [ {lowest}, {highest} ], got: {text}"
        )
    if name != "trace_count":
        return number % 2**32
    if number < -1:
        raise InferenceError(f"Unable to parse '{name}'. Expecting value >= -1, got:{number}")
    return number


def _levels(values: list[Any]) -> list[str]:
    """Return the known levels, or OFF when there are none."""
    if any(not isinstance(value, str) for value in values):
        raise InferenceError("attempt to access JSON non-string as string", Code.INTERNAL)
    known = [value for value in values if value in LEVELS and value != "OFF"]
    return known or ["OFF"]
