"""Upstream's own way to end a request early: another request of the same id, with `stop` set.

The one that runs ends with the tokens it has; the one that stops it has an empty answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from slipstream.server.errors import InferenceError
from slipstream.server.inference import InferRequest

NO_ID = "A request id must be provided for request cancellation"


class Stoppable(Protocol):
    def cancel(self, reason: str = "cancelled") -> None: ...


class StopRequests:
    """The requests of one model that run under an id of their client's choice."""

    def __init__(self) -> None:
        self._running: dict[str, list[Stoppable]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def listing(self, request_id: str) -> Iterator[list[Stoppable]]:
        """Put what runs for this request into the list; it can be stopped until the block ends."""
        running: list[Stoppable] = []
        if request_id:
            self._running[request_id] = running  # of two with the same id, the newer one is meant
        try:
            yield running
        finally:
            if self._running.get(request_id) is running:
                del self._running[request_id]

    def stop(self, request_id: str) -> None:
        """One that is not there, or no longer, is no error."""
        if not request_id:
            raise InferenceError(NO_ID)
        for running in self._running.get(request_id, ()):
            running.cancel("stop")


def asks_to_stop(request: InferRequest, fields: Any) -> bool:
    """`fields`: the wire's name → the field."""
    return any(
        bool(tensor.data) and tensor.data[0] is True
        for name, tensor in request.inputs.items()
        if fields.get(name, name) == "stop"
    )
