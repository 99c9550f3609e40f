"""The part of a request's trace that HTTP itself knows: when it came in, and when its answer went
out.
"""

from __future__ import annotations

from typing import Any

from slipstream.server.http.asgi import Send
from slipstream.server.tracing.tracing import RequestTrace


class StampedSend:
    """The `send` of a request that is traced."""

    def __init__(self, send: Send, trace: RequestTrace, began_ns: int = 0) -> None:
        self._send = send
        self._trace = trace
        trace.stamp("HTTP_RECV_START", began_ns)

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._trace.stamp("HTTP_SEND_START")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._trace.stamp("HTTP_SEND_END")
