"""The admission check for requests with adapters. No torch here.

A request whose adapter is still loading lets later requests go first. A request whose adapter finds
no free pages lets only requests without an adapter go first: otherwise it might wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slipstream.engine.adapters.cache import AdapterCache
from slipstream.engine.messages import EngineStats
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest, Request


class AdapterAdmission:
    def __init__(self, adapters: AdapterCache | None) -> None:
        """adapters: None if the runner has no adapters; their numbers then only keep cached
        blocks apart.
        """
        self._adapters = adapters
        self._pages_wanted = False  # in this step a request found too few free pages
        self._deferred: list[Request] = []  # requests to queue again in the next step

    def problem(self, request: GenerateRequest) -> str:
        """Return why the request can never run; empty when it can."""
        if self._adapters is None or not request.adapter:
            return ""
        return self._adapters.problem(request.adapter, request.adapter_name or "the adapter")

    def hold(self, request: GenerateRequest) -> None:
        """Keep the adapter of a live request on the host."""
        if self._adapters is not None and request.adapter:
            self._adapters.hold(request.adapter)

    def release(self, request: GenerateRequest) -> None:
        """Undo `hold` when the request is over."""
        if self._adapters is not None and request.adapter:
            self._adapters.drop(request.adapter)

    def begin_step(self, step: int) -> list[Request]:
        """Begin to plan a step; return the requests that were deferred in the last one."""
        if self._adapters is not None:
            self._adapters.begin_step(step)
        self._pages_wanted = False
        deferred = self._deferred
        self._deferred = []
        return [request for request in deferred if request.finish_reason is None]

    def try_admit(self, request: Request) -> bool:
        """Return whether the request may start now. Otherwise it is deferred to the next step."""
        adapter = request.submitted.adapter
        if self._adapters is None or not adapter:
            return True
        loaded = self._adapters.is_loaded(adapter)
        if loaded and not self._pages_wanted and self._adapters.reserve(adapter):
            return True
        self._pages_wanted |= loaded
        self._deferred.append(request)
        return False

    def complete_plan(self, plan: StepPlan) -> None:
        """Add the adapters to be written to a plan that is about to be launched."""
        if self._adapters is not None:
            plan.placed = self._adapters.take_placed()
            self._adapters.step_launched(plan.step)

    def plan_returned(self, plan: StepPlan) -> None:
        """Record that a plan has finished, or will never be carried out."""
        if self._adapters is not None:
            self._adapters.step_returned(plan.step)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Return the statistics with those of adapters."""
        cache = self._adapters
        if cache is None or not cache.loads:
            return stats
        return replace(
            stats,
            adapters=cache.on_host,
            adapter_bytes=cache.used_bytes,
            adapter_loads=cache.loads,
            free_adapter_pages=cache.free_pages,
        )

    def check_integrity(self, live: Iterable[Request], running: Iterable[Request]) -> None:
        if self._adapters is not None:
            held = [request.submitted.adapter for request in live]
            used = [request.submitted.adapter for request in running]
            self._adapters.check_integrity(held, used)
