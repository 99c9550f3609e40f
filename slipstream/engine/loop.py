"""The engine's main loop, one turn at a time: plan, launch, take the oldest result, apply it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from slipstream.engine.constraints.constraints import Constraints
from slipstream.engine.messages import EngineInfo, EngineStats, StepOutputs
from slipstream.engine.plan import StepFailed, StepPlan, StepResult
from slipstream.engine.request import Constraint, FinishReason, GenerateRequest
from slipstream.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.engine.adapters.loader import AdapterLoader
    from slipstream.engine.cache.host_cache import HostCache
    from slipstream.kernels.adapters import AdapterPages

_LOADING_SECONDS = 0.005  # of sleep while there is nothing to do but wait for an adapter


class AnyHandle(Protocol):
    """A launched plan. `result` waits for it."""

    def result(self) -> StepResult: ...


class AnyRunner(Protocol):
    """What carries plans out; see runner.py for the CPU and gpu_runner.py for the GPU."""

    block_tokens: int
    cache: Tensor
    adapters: AdapterPages | None
    host: HostCache | None

    def launch(self, plan: StepPlan) -> AnyHandle: ...


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: AnyRunner,
        info: EngineInfo,
        depth: int = 1,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """depth: plans in flight. Two keep a GPU busy while the host plans; a CPU computes in
        launch() itself.
        """
        self.scheduler, self.runner, self.info, self.depth, self.adapters = (
            scheduler,
            runner,
            info,
            depth,
            adapters,
        )
        self.constraints = Constraints()  # replaced by whoever knows the tokenizer
        self._flight: deque[tuple[StepPlan, AnyHandle]] = deque()

    def submit(self, request: GenerateRequest) -> None:
        if request.sampling.constrained:
            self.constraints.begin(request)  # it comes to the scheduler once its constraint is made
        else:
            self._add(request)

    def _add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        if self.adapters is not None and request.adapter_source is not None:
            self.adapters.order(request.adapter, request.adapter_source)
            # its bytes need not live as long as the request
            request = replace(request, adapter_source=None)
        self.scheduler.add(request, constraint)

    def cancel(self, request_ids: Iterable[int], reason: FinishReason = "cancelled") -> None:
        for request_id in request_ids:
            if self.constraints.drop(request_id):
                self.scheduler.refuse(request_id, reason)
            else:
                self.scheduler.cancel(request_id, reason)

    def has_work(self) -> bool:
        return bool(self._flight) or self.scheduler.has_work() or len(self.constraints) > 0

    def step(self) -> StepOutputs | None:
        """One turn. Returns the news, or None when there is none."""
        if self.adapters is not None:
            self.adapters.collect()
        if len(self.constraints):
            self._take_constrained()
        plan = self.scheduler.plan()
        if plan is not None:
            try:
                self._flight.append((plan, self._launch(plan)))
            except StepFailed as failure:
                self.scheduler.abandon(plan, str(failure))
        elif not self._flight:
            self.constraints.wait(_LOADING_SECONDS)
            if self.adapters is not None:
                self.adapters.wait(_LOADING_SECONDS)
        if self._flight and (plan is None or len(self._flight) >= self.depth):
            done, handle = self._flight.popleft()
            self.scheduler.commit(done, handle.result())
        return self.scheduler.take_outputs()

    def _take_constrained(self) -> None:
        for request_id in self.constraints.take_late(time.monotonic()):
            self.scheduler.refuse(request_id, "timeout")
        for request, constraint, problem in self.constraints.take_made():
            if constraint is None:
                self.scheduler.refuse(request.request_id, "error", problem)
            else:
                self._add(request, constraint)

    def _launch(self, plan: StepPlan) -> AnyHandle:
        if self.adapters is not None and plan.placed:
            self.adapters.place(plan.placed)
            self.runner.adapters = self.adapters.pages
        return self.runner.launch(plan)

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()
