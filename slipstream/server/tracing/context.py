"""The trace that a caller says its request belongs to: W3C's `traceparent` and `tracestate`."""

from __future__ import annotations

import re
from typing import NamedTuple

from slipstream.server.tracing.tracing import Headers

MOST_STATE = 512  # characters of a state that has to be passed on
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]*")


class TraceContext(NamedTuple):
    trace_id: str  # both as lower-case hexadecimal digits
    span_id: str
    state: str = ""


def read_context(headers: Headers) -> TraceContext | None:
    """None where there is none, or one that cannot be understood: then the request begins a trace
    of its own.
    """
    parents = _values(headers, "traceparent")
    found = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, more = found.groups()
    if (
        version == "ff"
        or (version == "00" and more)
        or not int(trace_id, 16)
        or not int(span_id, 16)
    ):
        return None
    state = ",".join(_values(headers, "tracestate")).strip()
    return TraceContext(
        trace_id, span_id, state if len(state) <= MOST_STATE and _STATE.fullmatch(state) else ""
    )


def _values(headers: Headers, wanted: str) -> list[str]:
    """Names are in lower case, by gRPC's rules and by ASGI's."""
    names = (wanted, wanted.encode())
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for name, value in headers
        if name in names
    ]
