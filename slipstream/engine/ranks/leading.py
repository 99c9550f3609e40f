"""The leading rank: its runner sends every plan to the followers before it carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.engine.plan import StepFailed, StepPlan
from slipstream.engine.ranks.digests import ChangedRows
from slipstream.engine.ranks.orders import AdapterGone, AdapterHere, DigestRequest, Followers, Leave

if TYPE_CHECKING:
    from slipstream.engine.loop import LaunchedStep, StepRunner
    from slipstream.kernels.adapters import AdapterPages


class RankFailed(RuntimeError):
    """The ranks of an engine cannot continue together. The text says why."""


class LeadingRunner:
    """A runner whose plans are carried out by all ranks."""

    def __init__(self, runner: StepRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._changed = ChangedRows(runner.rows)
        # fixed after the start
        self.block_tokens = runner.block_tokens
        self.cache = runner.cache
        self.rows = runner.rows
        self.host = runner.host

    @property
    def adapters(self) -> AdapterPages | None:
        return self._runner.adapters

    @adapters.setter
    def adapters(self, pages: AdapterPages | None) -> None:
        self._runner.adapters = pages

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._followers.send(plan)
        self._changed.note(plan)
        try:
            return self._runner.launch(plan)
        except StepFailed as failure:
            # Whether the followers failed, too, is not known, and they may wait for this rank.
            raise RankFailed(str(failure)) from failure

    def add_adapter(self, parts: list[AdapterHere]) -> None:
        """Send each follower its part of an adapter."""
        for follower, part in enumerate(parts):
            self._followers.send(part, follower)

    def remove_adapter(self, adapter: int) -> None:
        self._followers.send(AdapterGone(adapter))

    def check_integrity(self) -> None:
        """Raise RankFailed if a follower holds other tokens or blocks than this rank."""
        self._followers.send(DigestRequest())
        own = self._changed.take_digests()
        for follower, answer in enumerate(self._followers.receive_digests()):
            for row in sorted(own.keys() | answer.rows.keys()):
                if own.get(row) != answer.rows.get(row):
                    raise RankFailed(
                        f"rank {follower + 1} holds other tokens than rank 0 (row {row})"
                    )

    def leave(self) -> None:
        """End the followers."""
        self._followers.send(Leave())
        self._followers.close()
