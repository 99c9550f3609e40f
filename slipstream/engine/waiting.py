"""The requests that wait for a row: higher priority first, equal ones in order of arrival. No torch
here.
"""

from __future__ import annotations

import heapq

from slipstream.engine.request import Request


class Waiting:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []  # (-priority, arrival, request)

    def push(self, *requests: Request) -> None:
        for request in requests:
            heapq.heappush(self._heap, (-request.request.priority, request.arrival, request))

    def first(self) -> Request | None:
        """The one that is next, which stays here."""
        while self._heap:
            request = self._heap[0][2]
            if request.finish_reason is None:
                return request
            heapq.heappop(self._heap)  # cancelled while it waited
        return None

    def pop(self) -> None:
        heapq.heappop(self._heap)
