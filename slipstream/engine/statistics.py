"""Counters and queue times of an engine, for its metrics. No torch here."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from slipstream.engine.blocks import BlockPool
from slipstream.engine.messages import QUEUE_SECONDS_BOUNDS, EngineStats, Timing
from slipstream.engine.request import Request, RequestStats


@dataclass(slots=True)
class Counters:
    """Counters under the names of `EngineStats`."""

    steps: int = 0
    context_requests: int = 0  # of the last step
    context_tokens: int = 0  # of the last step
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    reused_blocks: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    def begin_step(self) -> None:
        self.steps += 1
        self.context_requests = 0
        self.context_tokens = 0

    def stats(
        self, live: Collection[Request], blocks: BlockPool, queue_times: QueueTimes
    ) -> EngineStats:
        running = [request for request in live if request.row >= 0]
        return EngineStats(
            timestamp_us=time.time_ns() // 1000,
            running=len(running),
            waiting=len(live) - len(running),
            paused=sum(request.row < 0 <= request.epoch for request in live),
            generation_requests=sum(
                request.scheduled >= request.prompt_tokens for request in running
            ),
            free_blocks=blocks.available,
            cached_blocks=blocks.cached,
            total_blocks=blocks.total_blocks,
            queue_seconds=queue_times.seconds,
            queue_counts=list(queue_times.counts),
            **asdict(self),
        )


class QueueTimes:
    """Histogram of the time between a request's arrival and its first step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived: dict[int, float] = {}  # request id → arrival, of requests not yet started
        self.seconds = 0.0
        self.counts = [0] * (len(QUEUE_SECONDS_BOUNDS) + 1)

    def arrive(self, request_id: int) -> None:
        self._arrived[request_id] = self._clock()

    def start(self, request_id: int) -> None:
        waited = self._clock() - self._arrived.pop(request_id)
        self.seconds += waited
        self.counts[bisect_left(QUEUE_SECONDS_BOUNDS, waited)] += 1

    def leave(self, request_id: int) -> None:
        """Forget a finished request, which may never have started."""
        self._arrived.pop(request_id, None)


def to_timing(stats: RequestStats) -> Timing:
    """Convert a request's timestamps to the message that clients get."""

    def nanoseconds(seconds: float) -> int:
        return round(seconds * 1e9)

    return Timing(
        arrived_ns=nanoseconds(stats.arrived),
        first_scheduled_ns=nanoseconds(stats.first_scheduled),
        first_token_ns=nanoseconds(stats.first_token),
        last_token_ns=nanoseconds(stats.last_token),
        allocated_blocks=stats.allocated_blocks,
        prompt_blocks=stats.prompt_blocks,
        reused_blocks=stats.reused_blocks,
        draft_tokens=stats.draft_tokens,
        accepted_draft_tokens=stats.accepted_draft_tokens,
    )
