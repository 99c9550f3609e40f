"""The standard health service, `grpc.health.v1.Health`. Its two messages are small enough to be
written by hand.
"""

from __future__ import annotations

import asyncio

from slipstream.server.grpc.errors import check_access
from slipstream.server.grpc.transport import Call, Handler, StreamCall, Streaming, Unary
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState

SERVICE = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse.status
LOOK_EVERY_SECONDS = 0.5


def health_handlers(state: ServerState, access: Access) -> dict[str, Handler]:
    """The answer is the server's, whatever service is asked for, as with Triton."""

    def status() -> bytes:
        return _SERVING if state.ready else _NOT_SERVING

    async def check(request: bytes, call: Call) -> bytes:
        check_access(call, access, "health")
        return status()

    async def watch(call: StreamCall) -> None:
        check_access(call, access, "health")
        told = b""
        # a watcher must not hold up a server that leaves
        while not (state.draining and told == _NOT_SERVING):
            if (now := status()) != told:
                told = now
                await call.write(now)
            else:
                await asyncio.sleep(LOOK_EVERY_SECONDS)

    return {f"/{SERVICE}/Check": Unary(check), f"/{SERVICE}/Watch": Streaming(watch)}
