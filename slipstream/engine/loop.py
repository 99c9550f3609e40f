"""The engine's main loop, one turn at a time: plan, launch, take the oldest result, apply it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import FinishReason, GenerateRequest
from slipstream.engine.runner import Handle, Runner
from slipstream.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo, depth: int = 1) -> None:
        """depth: plans in flight. Two keep a GPU busy while the host plans; a CPU computes in launch() itself."""
        self.scheduler, self.runner, self.info, self.depth = scheduler, runner, info, depth
        self._flight: deque[tuple[StepPlan, Handle]] = deque()

    def submit(self, request: GenerateRequest) -> None:
        self.scheduler.add(request)

    def cancel(self, request_ids: Iterable[int], reason: FinishReason = "cancelled") -> None:
        for request_id in request_ids:
            self.scheduler.cancel(request_id, reason)

    def has_work(self) -> bool:
        return bool(self._flight) or self.scheduler.has_work()

    def step(self) -> StepOutputs | None:
        """One turn. Returns the news, or None when there is none."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._flight.append((plan, self.runner.launch(plan)))
        if self._flight and (plan is None or len(self._flight) >= self.depth):
            done, handle = self._flight.popleft()
            self.scheduler.commit(done, handle.result())
        return self.scheduler.take_outputs()

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
