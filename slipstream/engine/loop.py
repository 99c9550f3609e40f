"""The engine's main loop, one turn at a time: plan, launch, take the oldest result, apply it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.plan import StepPlan, StepResult
from slipstream.engine.request import FinishReason, GenerateRequest
from slipstream.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor


class AnyHandle(Protocol):
    """A launched plan. `result` waits for it."""

    def result(self) -> StepResult: ...


class AnyRunner(Protocol):
    """What carries plans out; see runner.py for the CPU and gpu_runner.py for the GPU."""

    block_tokens: int
    cache: Tensor

    def launch(self, plan: StepPlan) -> AnyHandle: ...


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: AnyRunner, info: EngineInfo, depth: int = 1) -> None:
        """depth: plans in flight. Two keep a GPU busy while the host plans; a CPU computes in launch() itself."""
        self.scheduler, self.runner, self.info, self.depth = scheduler, runner, info, depth
        self._flight: deque[tuple[StepPlan, AnyHandle]] = deque()

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
