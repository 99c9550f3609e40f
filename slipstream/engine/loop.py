"""The engine's main loop: plan a step, launch it, wait for the oldest result, apply it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from slipstream.engine.blocks import BlockPool
from slipstream.engine.constraints.constraints import Constraints
from slipstream.engine.messages import (
    RECENT_STEPS,
    EngineInfo,
    EngineStats,
    StepOutputs,
    StepRecord,
)
from slipstream.engine.plan import StepFailed, StepPlan, StepResult
from slipstream.engine.request import Constraint, FinishReason, GenerateRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from slipstream.engine.adapters.loader import AdapterLoader
    from slipstream.engine.cache.host_cache import HostCache
    from slipstream.engine.ranks.leading import LeadingRunner
    from slipstream.engine.rows import Rows
    from slipstream.kernels.adapters import AdapterPages

Progress = Callable[[str, int, int], None]  # phase of the start, steps done, steps in all
_WARM_UP_REQUEST = -1
_IDLE_SECONDS = 0.005  # wait for a constraint or an adapter when there is no other work


class LaunchedStep(Protocol):
    """A launched plan. `result` waits for it."""

    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    """Carries out plans; see runner.py for the CPU and gpu/runner.py for the GPU."""

    block_tokens: int
    rows: Rows
    adapters: AdapterPages | None
    host: HostCache | None

    @property
    def cache(self) -> Tensor | np.ndarray: ...

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        info: EngineInfo,
        depth: int = 1,
        adapters: AdapterLoader | None = None,
        leader: LeadingRunner | None = None,
    ) -> None:
        """depth: plans in flight. Two keep a GPU busy while the host plans; a CPU computes in
        launch() itself. leader: `runner`, if there are several ranks
        """
        self.scheduler = scheduler
        self.runner = runner
        self.info = info
        self.depth = depth
        self.adapters = adapters
        self._leader = leader
        # called when the other ranks have the order to end
        self.on_close: Callable[[], None] = lambda: None
        self.constraints = Constraints()  # the caller replaces it if it has a tokenizer
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._recent_steps: deque[StepRecord] = deque(maxlen=RECENT_STEPS)

    def submit(self, request: GenerateRequest) -> None:
        if request.sampling.constrained:
            self.constraints.start(request)  # it is scheduled once its constraint is built
        else:
            self._add(request)

    def _add(self, request: GenerateRequest, constraint: Constraint | None = None) -> None:
        if self.adapters is not None and request.adapter_source is not None:
            self.adapters.request_load(request.adapter, request.adapter_source)
            # The source's bytes need not live as long as the request.
            request = replace(request, adapter_source=None)
        self.scheduler.add(request, constraint)

    def cancel(self, request_ids: Iterable[int], reason: FinishReason = "cancelled") -> None:
        for request_id in request_ids:
            if self.constraints.drop(request_id):
                self.scheduler.refuse(request_id, reason)
            else:
                self.scheduler.cancel(request_id, reason)

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work() or len(self.constraints) > 0

    def step(self) -> StepOutputs | None:
        """Run one step; return the new outputs, or None."""
        if self.adapters is not None:
            self.adapters.collect()
        if len(self.constraints):
            self._take_constrained()
        plan = self.scheduler.plan()
        if plan is not None:
            try:
                self._in_flight.append((plan, self._launch(plan)))
            except StepFailed as failure:
                self.scheduler.abandon(plan, str(failure))
        elif not self._in_flight:
            self.scheduler.wait_for_revisions(_IDLE_SECONDS)
            self.constraints.wait(_IDLE_SECONDS)
            if self.adapters is not None:
                self.adapters.wait(_IDLE_SECONDS)
        if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
            done, handle = self._in_flight.popleft()
            self.scheduler.commit(done, handle.result())
        return self.scheduler.take_outputs()

    def _take_constrained(self) -> None:
        for request_id in self.constraints.take_expired(time.monotonic()):
            self.scheduler.refuse(request_id, "timeout")
        for request, constraint, problem in self.constraints.take_ready():
            if constraint is None:
                self.scheduler.refuse(request.request_id, "error", problem)
            else:
                self._add(request, constraint)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        now_us = time.time_ns() // 1000
        # the lists of a plan do not change once it is launched
        self._recent_steps.append(
            StepRecord(now_us, plan.rows, plan.epochs, plan.counts, plan.samples)
        )
        if self.adapters is not None and plan.placed:
            self.adapters.place(plan.placed)
            self.runner.adapters = self.adapters.pages
        return self.runner.launch(plan)

    def stats(self) -> EngineStats:
        """Return the statistics, with the steps since the last call."""
        recent_steps = list(self._recent_steps)
        self._recent_steps.clear()
        return replace(self.scheduler.stats(), recent_steps=recent_steps)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()
        if self._leader is not None and not self._in_flight:
            self._leader.check_integrity()

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self._leader is not None:
            self._leader.leave()
        self.on_close()


def warm_up(
    runner: StepRunner,
    vocab_size: int,
    total_blocks: int,
    longest: int,
    tokens: int = 16,
    requests: int = 1,
    steps: int = 1,
    output: int = 2,
) -> int:
    """Run requests of `tokens` tokens through the runner, so that users do not wait for its first
    calls. Return their prompt tokens: fewer where the cache is small.

    steps: the number of steps that the prompt of a single request takes; output: tokens to generate
    """
    pool = BlockPool(total_blocks, runner.block_tokens, reuse=False)
    tokens = min(tokens, longest - 2, total_blocks * runner.block_tokens // requests - 2)
    budget = requests * longest if steps == 1 else max(1, -(-tokens // steps))
    scheduler = Scheduler(pool, requests, budget, longest, vocab_size)
    for number in range(requests):
        scheduler.add(
            GenerateRequest(
                _WARM_UP_REQUEST - number, [0] * tokens, SamplingParams(max_tokens=output)
            )
        )
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, runner.launch(plan).result())
    return tokens * requests
