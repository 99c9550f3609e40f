"""The options of a server. Commands fill them in; nothing here imports HTTP or gRPC."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.server.engine_link.child import ENGINE_COMMAND
from slipstream.server.engine_link.client import Supervision
from slipstream.server.engine_link.cluster.leader import ClusterOptions
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.certificates import CertificateFiles
from slipstream.server.kserve.context import DEFAULT_HTTP_MAX_INPUT_BYTES
from slipstream.server.kserve.origins import OriginPolicy
from slipstream.server.text.chat import ChatOptions
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
    load_models: tuple[str, ...] = ()  # loaded at the start in mode "explicit"; `*` is all models
    poll_seconds: float = 15.0
    frontends: int = 1  # processes that share the ports; 0: by the cores of the machine
    strict_readiness: bool = True
    exit_on_error: bool = True
    exit_timeout_seconds: float = 30.0
    server_name: str = "triton"
    allow_python_models: bool = False
    complete_config: bool = True  # whether Python models complete their own configuration
    allow_client_shared_memory: bool = False
    access: Access = field(default_factory=Access)
    allowed_hosts: tuple[str, ...] = ()  # names of the server besides those of this machine
    cors_origins: tuple[str, ...] = ()  # origins of pages that may use the server
    http_certificate: CertificateFiles | None = None  # None: HTTP without TLS
    embedding_pooling: str = ""  # kind of pooling, whatever the models declare; empty: theirs
    http_metrics: bool = False  # whether the HTTP port serves /metrics, too
    http_max_input_bytes: int = DEFAULT_HTTP_MAX_INPUT_BYTES
    http_forwarded_headers: re.Pattern[str] | None = None
    grpc_forwarded_headers: re.Pattern[str] | None = None
    grpc_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of GrpcOptions
    trace_settings: Mapping[str, Any] = field(default_factory=dict)
    trace_export: ExportSettings | None = None  # None: traces are written to files
    response_cache_bytes: int = 0  # 0: no cache
    # resources of Python models by name and device; None: no limits
    rate_limits: Mapping[tuple[str, int | str], int] | None = None
    metrics_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of MetricsConfig
    # engine settings that override those of the repository
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    chat: ChatOptions = field(default_factory=ChatOptions)
    cluster: ClusterOptions | None = None  # None: all ranks of engines are on this machine
    supervision: Supervision = field(default_factory=Supervision)
    engine_command: Sequence[str] = ENGINE_COMMAND
    prepare_seconds: float = 0.0  # spent on the import of a model before the server started
    announce: bool = True  # whether to print the addresses and a command to try

    @property
    def addresses(self) -> list[str]:
        return [port.address for port in (self.http, self.grpc, self.metrics) if port.open]

    @property
    def grpc_certificate(self) -> CertificateFiles | None:
        certificate = self.grpc_settings.get("server_certificate")
        key = self.grpc_settings.get("server_key")
        if certificate is None or key is None:
            return None
        return CertificateFiles(certificate, key, self.grpc_settings.get("root_certificate"))

    @property
    def origin_policy(self) -> OriginPolicy:
        return self._origin_policy_at(self.http.address)

    @property
    def metrics_origin_policy(self) -> OriginPolicy:
        return self._origin_policy_at(self.metrics.address)

    def _origin_policy_at(self, address: str) -> OriginPolicy:
        return OriginPolicy(is_loopback(address), self.allowed_hosts, self.cors_origins)


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches this address."""
    return address.startswith("127.") or address in ("localhost", "::1")
