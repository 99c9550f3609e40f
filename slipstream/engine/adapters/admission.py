"""Who may start, as far as adapters go. No torch here.

A request whose adapter still loads steps aside for those behind it. One whose adapter finds no free
pages steps aside for requests without an adapter only: those with one wait behind it, or it might
wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slipstream.engine.adapters.adapters import Adapters
from slipstream.engine.messages import EngineStats
from slipstream.engine.plan import StepPlan
from slipstream.engine.request import GenerateRequest, Request


class AdapterGate:
    def __init__(self, adapters: Adapters | None) -> None:
        """adapters: None where nobody computes with adapters, so that all there is to one is its
        number.
        """
        self._adapters = adapters
        self._pages_wanted = False  # in this step, by one that found too few
        self._aside: list[Request] = []

    def problem(self, request: GenerateRequest) -> str:
        """Why it can never run; empty when it can."""
        if self._adapters is None or not request.adapter:
            return ""
        return self._adapters.problem(request.adapter, request.adapter_name or "the adapter")

    def enter(self, request: GenerateRequest) -> None:
        if self._adapters is not None and request.adapter:
            self._adapters.hold(request.adapter)

    def leave(self, request: GenerateRequest) -> None:
        if self._adapters is not None and request.adapter:
            self._adapters.drop(request.adapter)

    def begin(self, step: int) -> list[Request]:
        """A step is being planned: those that stepped aside in the last one get back in line."""
        if self._adapters is not None:
            self._adapters.begin(step)
        self._pages_wanted = False
        back, self._aside = self._aside, []
        return [request for request in back if request.finish_reason is None]

    def admits(self, request: Request) -> bool:
        """Whether it may start now; otherwise it is kept aside until the next step."""
        adapter = request.request.adapter
        if self._adapters is None or not adapter:
            return True
        loaded = self._adapters.is_loaded(adapter)
        if loaded and not self._pages_wanted and self._adapters.reserve(adapter):
            return True
        self._pages_wanted |= loaded
        self._aside.append(request)
        return False

    def finish(self, plan: StepPlan) -> None:
        """The plan is about to be launched."""
        if self._adapters is not None:
            plan.placed = self._adapters.take_placed()
            self._adapters.launched(plan.step)

    def returned(self, plan: StepPlan) -> None:
        """It has been carried out, or never will be."""
        if self._adapters is not None:
            self._adapters.returned(plan.step)

    def stats(self, stats: EngineStats) -> EngineStats:
        books = self._adapters
        if books is None or not books.loads:
            return stats
        return replace(
            stats,
            adapters=books.on_host,
            adapter_bytes=books.used_bytes,
            adapter_loads=books.loads,
            free_adapter_pages=books.free_pages,
            total_adapter_pages=books.total_pages,
        )

    def check_integrity(self, live: Iterable[Request], running: Iterable[Request]) -> None:
        if self._adapters is not None:
            held, used = ([r.request.adapter for r in requests] for requests in (live, running))
            self._adapters.check_integrity(held, used)
