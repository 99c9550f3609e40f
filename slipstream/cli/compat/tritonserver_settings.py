"""The flags of tritonserver that hold settings: trace, response cache, rate limiter, metrics."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.cli.compat.tritonserver_flags import FlagError, FlagValues

if TYPE_CHECKING:
    from slipstream.server.tracing.export_settings import ExportSettings

# flag of older releases: the setting of --trace-config that replaced it
_OLD_TRACE_FLAGS = {
    "trace-file": "file",
    "trace-level": "level",
    "trace-rate": "rate",
    "trace-count": "count",
    "trace-log-frequency": "log-frequency",
}
_TRACE_SETTINGS = {
    "file": "trace_file",
    "rate": "trace_rate",
    "count": "trace_count",
    "log-frequency": "log_frequency",
}
_LEVELS = {
    "OFF": [],
    "TIMESTAMPS": ["TIMESTAMPS"],
    "TENSORS": ["TENSORS"],
    "MIN": ["TIMESTAMPS"],
    "MAX": ["TIMESTAMPS"],
}
_MODES = ("triton", "opentelemetry")
_FILE_SETTINGS = ("file", "log-frequency")
_METRIC_SWITCHES = ("summary_latencies", "counter_latencies", "histogram_latencies")


class Tracing(NamedTuple):
    """The arguments of `TraceSettings`."""

    settings: dict[str, Any]
    export: ExportSettings | None  # None: traces are written to files


def trace_settings(given: FlagValues) -> Tracing:
    """Return the settings of --trace-config and of the older trace flags."""
    general: list[tuple[str, str]] = []
    spans: list[tuple[str, str]] = []
    files = [
        (name, given[flag]) for flag, name in _OLD_TRACE_FLAGS.items() if given[flag] is not None
    ]
    for text in given["trace-config"]:
        scope, name, value = _setting("trace-config", text)
        if scope not in ("", *_MODES):
            raise FlagError(f"--trace-config: '{text}': the modes are {' and '.join(_MODES)}")
        {"": general, "triton": files, "opentelemetry": spans}[scope].append((name, value))
    mode = dict(general).get("mode", "triton")
    if mode not in _MODES:
        raise FlagError(f"--trace-config: mode must be triton or opentelemetry, not '{mode}'")
    unused = [name for name, _ in spans]
    if mode == "opentelemetry":
        unused = [name for name, _ in (*files, *general) if name in _FILE_SETTINGS]
    if unused:
        raise FlagError(f"--trace-config: '{unused[0]}' means nothing in the mode {mode}")
    settings = _trace_values([pair for pair in (*files, *general) if pair[0] != "mode"])
    tracing = Tracing(settings, _export(spans) if mode == "opentelemetry" else None)
    _check_trace(tracing)
    return tracing


def _trace_values(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    levels: list[str] = []
    for name, value in pairs:
        if name == "level":
            if value.upper() not in _LEVELS:
                raise FlagError(
                    f"--trace-config: level must be one of {', '.join(_LEVELS)}, not '{value}'"
                )
            levels += [level for level in _LEVELS[value.upper()] if level not in levels]
        elif name in _TRACE_SETTINGS:
            settings[_TRACE_SETTINGS[name]] = (
                value if name == "file" else _whole_number("trace-config", name, value)
            )
        else:
            known = ", ".join(("level", "mode", *_TRACE_SETTINGS))
            raise FlagError(f"--trace-config: unknown setting '{name}', there are: {known}")
    settings["trace_level"] = levels or ["OFF"]
    return settings


def _export(pairs: Iterable[tuple[str, str]]) -> ExportSettings:
    from slipstream.server.tracing.export_settings import read_export

    try:
        return read_export(pairs, os.environ)
    except ValueError as error:
        raise FlagError(f"--trace-config: {error}") from error


def _check_trace(tracing: Tracing) -> None:
    from slipstream.server.kserve.errors import InferenceError
    from slipstream.server.tracing.settings import TraceSettings

    try:
        TraceSettings(*tracing)
    except InferenceError as error:
        raise FlagError(f"--trace-config: {error.message}") from error


def _whole_number(flag: str, name: str, text: str) -> str:
    if not text.removeprefix("-").isdigit():
        raise FlagError(f"--{flag}: {name} must be a whole number, not '{text}'")
    return str(int(text))


def response_cache_bytes(given: FlagValues) -> int:
    """Return the size of the response cache in bytes; 0: no cache."""
    size = int(given["response-cache-byte-size"] or 0)
    for text in given["cache-config"]:
        cache, name, value = _setting("cache-config", text)
        if cache != "local":
            raise FlagError(f"--cache-config: '{text}' is not supported: the only cache is 'local'")
        if name != "size":
            raise FlagError(f"--cache-config: the cache 'local' has no setting '{name}', only size")
        size = int(_whole_number("cache-config", name, value))
    if size < 0:
        raise FlagError(f"--cache-config: size must be 0 or more, not {size}")
    return size


def rate_limits(given: FlagValues) -> dict[tuple[str, int | str], int] | None:
    from slipstream.server.python_models.rate_limiter import parse_resources

    mode = given["rate-limit"] or "off"
    if mode not in ("off", "execution_count"):
        raise FlagError(f"--rate-limit must be off or execution_count, not '{mode}'")
    if mode == "off":
        if given["rate-limit-resource"]:
            raise FlagError("--rate-limit-resource needs --rate-limit=execution_count")
        return None
    try:
        return parse_resources(given["rate-limit-resource"])
    except ValueError as error:
        raise FlagError(f"--rate-limit-resource: {error}") from error


def metrics_settings(given: FlagValues) -> dict[str, Any]:
    """Return the arguments of `MetricsConfig`."""
    settings: dict[str, Any] = {}
    for text in given["metrics-config"]:
        scope, name, value = _setting("metrics-config", text)
        if scope:
            raise FlagError(
                f"--metrics-config: '{text}' is not supported: settings are <setting>=<value>"
            )
        if name in _METRIC_SWITCHES:
            if value.lower() not in ("true", "false"):
                raise FlagError(f"--metrics-config: {name} must be true or false, not '{value}'")
            settings[name] = value.lower() == "true"
        elif name == "summary_quantiles":
            settings[name] = _quantiles(value.split(","))
        else:
            known = ", ".join((*_METRIC_SWITCHES, "summary_quantiles"))
            raise FlagError(f"--metrics-config: unknown setting '{name}', there are: {known}")
    return settings


def _quantiles(texts: Iterable[str]) -> tuple[float, ...]:
    """Read `0.5:0.05,0.9:0.01`. The allowed errors are not used: the quantiles are exact."""
    found = []
    for text in texts:
        try:
            quantile = float(text.partition(":")[0])
        except ValueError as error:
            raise FlagError(
                f"--metrics-config: '{text}' is no quantile with its error, such as 0.9:0.01"
            ) from error
        if not 0 <= quantile <= 1:
            raise FlagError(f"--metrics-config: a quantile is between 0 and 1, not {quantile:g}")
        found.append(quantile)
    return tuple(found)


def _setting(flag: str, text: str) -> tuple[str, str, str]:
    """Split `local,size=1` at the first `=`: a value may hold commas."""
    before, equals, value = text.partition("=")
    *scopes, name = before.split(",", 1)
    scope = scopes[0] if scopes else ""
    if not equals or not name:
        raise FlagError(f"--{flag}: '{text}' must be <setting>=<value> or <name>,<setting>=<value>")
    return scope.strip(), name.strip(), value.strip()
