"""The totals of an engine's earlier processes, so that counters never fall."""

from __future__ import annotations

from typing import Protocol

from slipstream.engine.messages import EngineStats


class Predecessor(Protocol):
    """An engine that another one has replaced. It may still finish its work."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def totals_are_final(self) -> bool: ...


class PastTotals:
    """The totals of processes and engines that an engine has replaced."""

    def __init__(self) -> None:
        self.predecessor: Predecessor | None = None
        self._ended = EngineStats()

    def add(self, stats: EngineStats) -> None:
        """Add the totals of a process that has ended."""
        self._ended = self._ended.plus_totals_of(stats)

    def added_to(self, stats: EngineStats) -> EngineStats:
        """Return these statistics with the past totals added."""
        self.drop_ended()
        total = stats.plus_totals_of(self._ended)
        if self.predecessor is None:
            return total
        return total.plus_totals_of(self.predecessor.stats)

    def drop_ended(self) -> None:
        """Keep the totals of a predecessor that are final, and no longer the predecessor."""
        predecessor = self.predecessor
        if predecessor is not None and predecessor.totals_are_final:
            self.add(predecessor.stats)
            self.predecessor = None

    @property
    def are_final(self) -> bool:
        """Return whether no predecessor adds to them any more. One may outlive its successor."""
        self.drop_ended()
        return self.predecessor is None
