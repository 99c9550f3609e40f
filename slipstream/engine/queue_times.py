"""How long requests wait before their first step, counted in classes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from slipstream.engine.messages import QUEUE_SECONDS_BOUNDS


class QueueTimes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived: dict[int, float] = {}  # request id → when, of those that have not started
        self.seconds = 0.0
        self.counts = [0] * (len(QUEUE_SECONDS_BOUNDS) + 1)

    def arrive(self, request_id: int) -> None:
        self._arrived[request_id] = self._clock()

    def start(self, request_id: int) -> None:
        waited = self._clock() - self._arrived.pop(request_id)
        self.seconds += waited
        self.counts[bisect_left(QUEUE_SECONDS_BOUNDS, waited)] += 1

    def leave(self, request_id: int) -> None:
        """It is over, perhaps before it began."""
        self._arrived.pop(request_id, None)
