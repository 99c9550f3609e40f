"""How long an engine process has been silent: whether it is stopped, or hangs."""

from __future__ import annotations

SILENT_SECONDS = 1.25  # longest silence of a process that is ready, if its steps are short
_FORGET_SECONDS = 300.0  # time in which half of the longest silence is forgotten


class Silence:
    """The time since the last message of a process, and whether it is unusually long.

    Messages come between two steps, and a step on a CPU can take seconds.
    """

    def __init__(self, longest_seconds: float) -> None:
        """`longest_seconds`: the silence after which the process is killed."""
        self.seconds = 0.0
        self._longest_seconds = longest_seconds
        self._usual_seconds = 0.0  # the longest silence before; forgotten slowly

    @property
    def unusual(self) -> bool:
        limit = min(2 * self._usual_seconds, self._longest_seconds / 4)
        return self.seconds > max(SILENT_SECONDS, limit)

    def count(self, seconds: float, heard: bool) -> None:
        """Note that this much time has passed, and whether a message came in it."""
        self._usual_seconds *= 0.5 ** (seconds / _FORGET_SECONDS)
        if heard:
            self._usual_seconds = max(self._usual_seconds, self.seconds)
            self.seconds = 0.0
        else:
            self.seconds += seconds
