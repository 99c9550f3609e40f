"""Where the spans of traces go and how, as `--trace-config opentelemetry,…` and OpenTelemetry's
variables say it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

SETTINGS = (
    "url",
    "resource",
    "bsp_schedule_delay",
    "bsp_max_export_batch_size",
    "bsp_max_queue_size",
)
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_PATH = "/v1/traces"  # of a collector that is known by its address only


@dataclass(frozen=True)
class ExportSettings:
    url: str = "http://localhost:4318/v1/traces"
    resource: Mapping[str, str] = field(
        default_factory=lambda: {"service.name": "triton-inference-server"}
    )
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # they may hold a key
    timeout_seconds: float = 10.0
    queue_spans: int = 2048
    batch_spans: int = 512
    delay_ms: int = 5000  # between two exports

    @property
    def address(self) -> str:
        """The URL for others to see: a query may hold a key."""
        return self.url.partition("?")[0]

    def shown(self) -> dict[str, str | list[str]]:
        """By the names that Triton shows them by."""
        return {
            "url": self.address,
            "resource": [f"{name}={value}" for name, value in self.resource.items()],
            "bsp_schedule_delay": str(self.delay_ms),
            "bsp_max_export_batch_size": str(self.batch_spans),
            "bsp_max_queue_size": str(self.queue_spans),
        }


def read_export(given: Iterable[tuple[str, str]], environment: Mapping[str, str]) -> ExportSettings:
    """`given`: settings of the command line, which win over variables. ValueError says in one line
    what is wrong.
    """
    pairs = list(given)
    named = {name: value for name, value in pairs if name != "resource"}
    if unknown := [name for name in named if name not in SETTINGS]:
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
        url=_checked_url(named.get("url") or _endpoint(environment)),
        resource=_resource([value for name, value in pairs if name == "resource"], environment),
        headers=_headers(_otlp("HEADERS", environment)),
        timeout_seconds=_whole("OTEL_EXPORTER_OTLP_TIMEOUT", _otlp("TIMEOUT", environment), 10_000)
        / 1000,
        queue_spans=queue,
        batch_spans=batch,
        delay_ms=_number("bsp_schedule_delay", named, environment, 5000),
    )


def _otlp(name: str, environment: Mapping[str, str]) -> str:
    """The variable for traces wins over the one for everything."""
    return (
        environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
        or environment.get(f"OTEL_EXPORTER_OTLP_{name}")
        or ""
    )


def _headers(text: str) -> dict[str, str]:
    found = {name.lower(): unquote(value) for name, value in _pairs(text)}
    for name, value in found.items():
        if not _NAME.fullmatch(name) or not value.isascii() or not value.isprintable():
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_HEADERS: '{name}' is no header, or its value is none"
            )
    return found


def _endpoint(environment: Mapping[str, str]) -> str:
    if for_traces := environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return for_traces
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return base.rstrip("/") + _PATH if base else ExportSettings.url


def _checked_url(url: str) -> str:
    told = url.partition("?")[0]  # a query may hold a key
    if "@" in told:  # ahead of whatever else is wrong, which is told with all of this
        raise ValueError(
            "url must not hold a name or a password: OTEL_EXPORTER_OTLP_HEADERS is the place for them"
        )
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"url must be http://<host>:<port>{_PATH} or the like, not '{told}'")
    return url


def _resource(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    found = dict(ExportSettings().resource)
    found |= {
        name: unquote(value)
        for name, value in _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    }
    if service := environment.get("OTEL_SERVICE_NAME"):
        found["service.name"] = service
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"resource must be <name>=<value>, not '{text}'")
        found[name.strip()] = value.strip()
    return found


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=1,b=2`; what has no name or no `=` is passed over, as other programs do with these
    variables.
    """
    split = [one.partition("=") for one in text.split(",")]
    return [
        (name.strip(), value.strip()) for name, equals, value in split if equals and name.strip()
    ]


def _number(
    name: str, named: Mapping[str, str], environment: Mapping[str, str], default: int
) -> int:
    variable = f"OTEL_{name.upper()}"
    return _whole(
        *((name, named[name]) if name in named else (variable, environment.get(variable, ""))),
        default,
    )


def _whole(name: str, text: str, default: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise ValueError(f"{name} must be a whole number above 0, not '{text}'")
    return int(text)
