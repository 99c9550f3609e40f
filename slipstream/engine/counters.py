"""What an engine has done since its start, as its metrics tell it. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from slipstream.engine.blocks import BlockPool
from slipstream.engine.messages import EngineStats
from slipstream.engine.queue_times import QueueTimes
from slipstream.engine.request import Request


@dataclass(slots=True)
class Counters:
    """By the names that `EngineStats` has for them."""

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
        self.context_requests = self.context_tokens = 0

    def stats(
        self, live: Collection[Request], blocks: BlockPool, queue_times: QueueTimes
    ) -> EngineStats:
        running = [request for request in live if request.row >= 0]
        return EngineStats(
            running=len(running),
            waiting=len(live) - len(running),
            paused=sum(request.row < 0 <= request.generation for request in live),
            generation_requests=sum(
                request.computed >= request.prompt_tokens for request in running
            ),
            free_blocks=blocks.available,
            cached_blocks=blocks.cached,
            total_blocks=blocks.total_blocks,
            queue_seconds=queue_times.seconds,
            queue_counts=list(queue_times.counts),
            **asdict(self),
        )
