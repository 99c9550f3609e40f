"""The objects that HTTP and gRPC share besides the models."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.server.kserve.access import Access
from slipstream.server.kserve.inference import RequestTrace
from slipstream.server.kserve.origins import OriginPolicy
from slipstream.server.kserve.repository_control import NoControl, RepositoryControl
from slipstream.server.kserve.shared_memory import SharedMemory

DEFAULT_HTTP_MAX_INPUT_BYTES = 64 << 20


class TraceControl(Protocol):
    """The trace settings of a server; `TraceSettings` implements it."""

    active: bool  # whether the requests to at least one model may be traced

    def begin(
        self, model: str, headers: Iterable[tuple[str | bytes, str | bytes]], operation: str = ...
    ) -> RequestTrace | None:
        """Return the trace of a request, or None when it is not sampled."""
        ...

    def get(self, model: str = "") -> Mapping[str, Any]: ...
    def update(self, requested: Mapping[str, Any], model: str = "") -> Mapping[str, Any]: ...


async def _do_nothing() -> None:
    """Return at once: there is only one front end."""


@dataclass(kw_only=True)
class ServerContext:
    trace: TraceControl
    control: RepositoryControl = field(default_factory=NoControl)
    memory: SharedMemory = field(default_factory=SharedMemory)
    access: Access = field(default_factory=Access)
    origin_policy: OriginPolicy = field(default_factory=OriginPolicy)
    server_name: str = "triton"
    http_max_input_bytes: int = DEFAULT_HTTP_MAX_INPUT_BYTES
    embedding_pooling: str = ""  # kind of pooling, whatever the models declare; empty: theirs
    # headers whose names match become parameters of an inference request
    http_forwarded_headers: re.Pattern[str] | None = None
    grpc_forwarded_headers: re.Pattern[str] | None = None
    # wait for the other front ends of the server: until their statistics have arrived, and until
    # they follow the settings and models of this one
    collect_statistics: Callable[[], Awaitable[None]] = _do_nothing
    settle: Callable[[], Awaitable[None]] = _do_nothing
