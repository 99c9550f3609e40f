"""Upstream's own way to end a request early: another request of the same id, with `stop` set.

What runs ends with the tokens it has; the request that stops it has an empty answer. Upstream's
client sends no id unless it is told to: over a connection, a stop order without one means whatever
runs there without one. Where nothing does, it is refused, as upstream refuses all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest

NO_ID = "A request id must be provided for request cancellation"


class Stoppable(Protocol):
    def cancel(self, reason: str = "cancelled") -> None: ...


class StopRequests:
    """The requests of one model that can be stopped by another; the parts of a batch have one id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[list[Stoppable]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def listing(self, request: InferRequest) -> Iterator[list[Stoppable]]:
        """Put what runs for this request into the list; it can be stopped until the block ends."""
        running: list[Stoppable] = []
        named = _named(request)
        if named is None:
            yield running
            return
        self._running.setdefault(named, []).append(running)
        try:
            yield running
        finally:
            beside = [other for other in self._running.pop(named) if other is not running]
            if beside:
                self._running[named] = beside

    def stop(self, request: InferRequest) -> None:
        """An id that is not there, or no longer, is no error."""
        named = _named(request)
        if named is None or not (request.id or named in self._running):
            raise InferenceError(NO_ID)
        for running in self._running.get(named, ()):
            for generation in running:
                generation.cancel("stop")


def _named(request: InferRequest) -> tuple[str, str] | None:
    """(id, connection), of which one is empty; None where a request has neither."""
    if request.id:
        return request.id, ""
    return None if request.peer is None else ("", request.peer())


def asks_to_stop(request: InferRequest, fields: Any) -> bool:
    """`fields`: the wire's name → the field."""
    return any(
        tensor.first is True
        for name, tensor in request.inputs.items()
        if fields.get(name, name) == "stop"
    )
