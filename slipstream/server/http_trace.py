"""The part of a request's trace that HTTP itself knows: when it came in, and when its answer went out."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from slipstream.server.asgi import Send
from slipstream.server.trace_settings import TraceSettings
from slipstream.server.tracing import RequestTrace


class TracedHttp:
    """`with TracedHttp(settings, model, send) as (trace, send):` None where the request is not traced."""

    __slots__ = ("_send", "_trace")

    def __init__(self, settings: TraceSettings, model: str, send: Send) -> None:
        self._trace = settings.begin(model)
        self._send = send

    def __enter__(self) -> tuple[RequestTrace | None, Send]:
        if self._trace is None:
            return None, self._send
        self._trace.stamp("HTTP_RECV_START")
        return self._trace, _StampedSend(self._send, self._trace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._trace is not None:
            self._trace.finish()


class _StampedSend:
    def __init__(self, send: Send, trace: RequestTrace) -> None:
        self._send = send
        self._trace = trace

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._trace.stamp("HTTP_SEND_START")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._trace.stamp("HTTP_SEND_END")
