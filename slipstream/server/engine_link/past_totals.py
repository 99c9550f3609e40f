"""The totals of an engine's earlier processes, so that counters never fall."""

from __future__ import annotations

from slipstream.engine.messages import EngineStats
from slipstream.server.engine_link.engine import Engine


class PastTotals:
    """The totals of processes and engines that an engine has replaced."""

    def __init__(self) -> None:
        self.predecessor: Engine | None = None  # it may still finish its work
        self._ended = EngineStats()

    def add(self, stats: EngineStats) -> None:
        """Add the totals of a process that has ended."""
        self._ended = self._ended.plus_totals_of(stats)

    def added_to(self, stats: EngineStats) -> EngineStats:
        """Return these statistics with the past totals added."""
        predecessor = self.predecessor
        if predecessor is None:
            return stats.plus_totals_of(self._ended)
        if predecessor.info is None:  # it has ended, so its totals are final
            self.add(predecessor.stats)
            self.predecessor = None
            return stats.plus_totals_of(self._ended)
        return stats.plus_totals_of(self._ended).plus_totals_of(predecessor.stats)
