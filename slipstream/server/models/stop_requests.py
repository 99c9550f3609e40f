"""TensorRT-LLM's way to end a request early: a second request with the same id and `stop` set.

The running request ends with the tokens it has; the second one has an empty answer. Without an id
it stops the requests without an id of the same connection, because TensorRT-LLM's client sends no
id by default. Where there are none, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from slipstream.server.engine_link.engine import InFlight
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest

NO_ID = "A request id must be provided for request cancellation"


class StopRequests:
    """The requests of one model that can be stopped. The items of a batch have the same id."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[list[InFlight]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def listing(self, request: InferRequest) -> Iterator[Callable[[InFlight], None]]:
        """Return a callback that adds a sequence of this request; it can be stopped until the end
        of the block.
        """
        running: list[InFlight] = []
        key = _key(request)
        if key is None:
            yield running.append
            return
        self._running.setdefault(key, []).append(running)
        try:
            yield running.append
        finally:
            others = [other for other in self._running.pop(key) if other is not running]
            if others:
                self._running[key] = others

    def finds(self, request: InferRequest) -> bool:
        """Return whether there are requests with the same id, or of the same connection."""
        return _key(request) in self._running

    def stop(self, request: InferRequest) -> None:
        """Stop the requests with the same id. An unknown id is no error."""
        key = _key(request)
        if key is None or not (request.id or key in self._running):
            raise InferenceError(NO_ID)
        self._stop(key)

    def stop_id(self, request_id: str) -> None:
        """Stop the requests with this id."""
        self._stop((request_id, ""))

    def _stop(self, key: tuple[str, str]) -> None:
        for running in self._running.get(key, ()):
            for in_flight in running:
                in_flight.cancel("stop")


def _key(request: InferRequest) -> tuple[str, str] | None:
    """Return (id, connection); one of them is empty. None: the request has neither."""
    if request.id:
        return request.id, ""
    return None if request.peer is None else ("", request.peer())


def is_stop_request(request: InferRequest, fields: Mapping[str, str]) -> bool:
    """Return whether `stop` is set. `fields`: input name → field."""
    return any(
        tensor.first is True
        for name, tensor in request.inputs.items()
        if fields.get(name, name) == "stop"
    )
