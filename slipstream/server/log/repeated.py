"""A warning that others can cause as often as they like is not logged each time."""

from __future__ import annotations

import asyncio
import logging

PERIOD_SECONDS = 10.0


class RepeatedWarning:
    """Logs a warning the first time, and then how often it was repeated in each period."""

    def __init__(
        self, logger: logging.Logger, text: str, period_seconds: float = PERIOD_SECONDS
    ) -> None:
        self._logger = logger
        self._text = text
        self._period_seconds = period_seconds
        self._waiting = False  # whether a period runs
        self._count = 0  # in the current period, without the one that was logged

    def __call__(self) -> None:
        """Note one occurrence. Call this on the event loop."""
        if self._waiting:
            self._count += 1
        else:
            self._logger.warning(self._text)
            self._begin_period()

    def _begin_period(self) -> None:
        self._waiting = True
        self._count = 0
        asyncio.get_running_loop().call_later(self._period_seconds, self._end_period)

    def _end_period(self) -> None:
        self._waiting = False
        if self._count:
            text = "%s (%d more in %g s)"
            self._logger.warning(text, self._text, self._count, self._period_seconds)
            self._begin_period()
