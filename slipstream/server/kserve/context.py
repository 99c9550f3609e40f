"""What HTTP and gRPC share besides the models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from slipstream.server.kserve.access import Access
from slipstream.server.kserve.repository_control import NoControl, RepositoryControl
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.tracing.settings import TraceSettings

DEFAULT_HTTP_MAX_INPUT_BYTES = 64 << 20


@dataclass
class ServerContext:
    control: RepositoryControl = field(default_factory=NoControl)
    memory: SharedMemory = field(default_factory=SharedMemory)
    trace: TraceSettings = field(default_factory=TraceSettings)
    access: Access = field(default_factory=Access)
    server_name: str = "triton"
    http_max_input_bytes: int = DEFAULT_HTTP_MAX_INPUT_BYTES
    # headers whose names match become parameters of an inference request
    http_forwarded_headers: re.Pattern[str] | None = None
    grpc_forwarded_headers: re.Pattern[str] | None = None
