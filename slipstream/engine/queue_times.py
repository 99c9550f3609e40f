"""How long requests wait before their first step, counted in classes; and when one of them was
where.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from slipstream.engine.messages import QUEUE_SECONDS_BOUNDS, Timing
from slipstream.engine.request import Marks


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


def timing_of(marks: Marks) -> Timing:
    def nanoseconds(seconds: float) -> int:
        return round(seconds * 1e9)

    return Timing(
        arrived_ns=nanoseconds(marks.arrived),
        first_scheduled_ns=nanoseconds(marks.first_scheduled),
        first_token_ns=nanoseconds(marks.first_token),
        last_token_ns=nanoseconds(marks.last_token),
        allocated_blocks=marks.allocated_blocks,
        prompt_blocks=marks.prompt_blocks,
        reused_blocks=marks.reused_blocks,
        draft_tokens=marks.draft_tokens,
        accepted_draft_tokens=marks.accepted_draft_tokens,
    )
