"""Settings of the trace mode `opentelemetry`: `--trace-config opentelemetry,NAME=VALUE`.

OpenTelemetry's SDK reads the other settings from its `OTEL_*` environment variables: headers,
timeout, certificates, compression and resource attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

SETTINGS = (
    "url",
    "resource",
    "bsp_schedule_delay",
    "bsp_max_export_batch_size",
    "bsp_max_queue_size",
)
_PATH = "/v1/traces"


@dataclass(frozen=True)
class ExportSettings:
    """The destination and the batches of spans. `resource` describes this server."""

    url: str = f"http://localhost:4318{_PATH}"
    resource: Mapping[str, str] = field(default_factory=dict)
    queue_spans: int = 2048
    batch_spans: int = 512
    delay_ms: int = 5000  # time between two exports

    @property
    def address(self) -> str:
        """The URL without its query, which may contain a key."""
        return self.url.partition("?")[0]


def read_export(given: Iterable[tuple[str, str]], environment: Mapping[str, str]) -> ExportSettings:
    """Return the settings of the command line, completed by environment variables.

    Raises ValueError with a message of one line.
    """
    pairs = list(given)
    named = {name: value for name, value in pairs if name != "resource"}
    unknown = [name for name in named if name not in SETTINGS]
    if unknown:
        raise ValueError(
            f"unknown setting '{unknown[0]}', the mode opentelemetry has: {', '.join(SETTINGS)}"
        )
    queue = _number("bsp_max_queue_size", named, environment, 2048)
    batch = _number("bsp_max_export_batch_size", named, environment, min(512, queue))
    if batch > queue:
        raise ValueError(
            f"bsp_max_export_batch_size is {batch}, more than the bsp_max_queue_size of {queue}"
        )
    return ExportSettings(
        url=_check_url(named.get("url") or _default_url(environment)),
        resource=_resource(value for name, value in pairs if name == "resource"),
        queue_spans=queue,
        batch_spans=batch,
        delay_ms=_number("bsp_schedule_delay", named, environment, 5000),
    )


def _default_url(environment: Mapping[str, str]) -> str:
    for_traces = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if for_traces:
        return for_traces
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return base.rstrip("/") + _PATH if base else ExportSettings.url


def _check_url(url: str) -> str:
    shown = url.partition("?")[0]  # the query may contain a key
    if "@" in shown:  # checked first, because the other message repeats the URL
        raise ValueError(
            "url must not hold a name or a password: "
            "OTEL_EXPORTER_OTLP_HEADERS is the place for them"
        )
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"url must be http://<host>:<port>{_PATH} or the like, not '{shown}'")
    return url


def _resource(given: Iterable[str]) -> dict[str, str]:
    attributes = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"resource must be <name>=<value>, not '{text}'")
        attributes[name.strip()] = value.strip()
    return attributes


def _number(
    name: str, named: Mapping[str, str], environment: Mapping[str, str], default: int
) -> int:
    """Return a whole number from the command line, else from its `OTEL_*` variable."""
    source = name
    text = named.get(name)
    if text is None:
        source = f"OTEL_{name.upper()}"
        text = environment.get(source, "")
        if not text:
            return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise ValueError(f"{source} must be a whole number above 0, not '{text}'")
    return int(text)
