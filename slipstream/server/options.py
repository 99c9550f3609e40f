"""Everything a server is told when it starts. Commands fill it in; nothing here loads the web
stack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.client import Supervision
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.context import DEFAULT_HTTP_MAX_INPUT_BYTES
from slipstream.server.tracing.export_settings import ExportSettings

ControlMode = Literal["none", "poll", "explicit"]
ALL_MODELS = "*"


@dataclass(frozen=True)
class Port:
    number: int
    address: str = "127.0.0.1"
    open: bool = True


@dataclass(frozen=True)
class ServerOptions:
    repositories: tuple[Path, ...]
    http: Port = Port(8000)
    grpc: Port = Port(8001)
    metrics: Port = Port(8002)
    control_mode: ControlMode = "none"
    load_models: tuple[str, ...] = ()  # at the start, in the mode explicit; `*` is all of them
    poll_seconds: float = 15.0
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout_seconds: float = 30.0
    server_name: str = "triton"
    allow_python_models: bool = False
    complete_config: bool = True  # Python models may complete their own configuration
    allow_client_shared_memory: bool = False
    access: Access = field(default_factory=Access)
    http_max_input_bytes: int = DEFAULT_HTTP_MAX_INPUT_BYTES
    http_forwarded_headers: re.Pattern[str] | None = None
    grpc_forwarded_headers: re.Pattern[str] | None = None
    grpc_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of GrpcOptions
    trace_settings: Mapping[str, Any] = field(default_factory=dict)
    trace_export: ExportSettings | None = None  # None: traces are files
    response_cache_bytes: int = 0  # 0: no cache
    # None: instances execute when they can
    rate_limits: Mapping[tuple[str, int | str], int] | None = None
    metrics_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of MetricsConfig
    # win over what the repository says
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    supervision: Supervision = field(default_factory=Supervision)
    engine_command: Sequence[str] = ENGINE_COMMAND
    announce: bool = True  # tell a person what to do next

    @property
    def addresses(self) -> list[str]:
        return [port.address for port in (self.http, self.grpc, self.metrics) if port.open]
