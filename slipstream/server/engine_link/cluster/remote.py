"""A rank on another machine, as the server sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slipstream.server.engine_link.cluster.messages import StartRank
from slipstream.server.engine_link.link import describe_exit
from slipstream.server.log.process_state import ProcessState


class RemoteRank:
    """A rank that a rank host runs, in place of a process of this machine."""

    def __init__(
        self,
        process: int,
        start: StartRank,
        end: Callable[[RemoteRank], None],
        show_stacks: Callable[[RemoteRank], None],
    ) -> None:
        """end, show_stacks: send these orders to the host of the rank"""
        self.process = process  # of the launcher, which runs the rank
        self.start = start
        self.host = ""  # name of the machine, once it is known
        self.reason = ""  # why it ended, if that is known
        self.stopped = False  # a signal has stopped its process, as its host reports
        self._end = end
        self._show_stacks = show_stacks
        self._code = 0
        self._over = threading.Event()

    @property
    def label(self) -> str:
        """The rank in messages."""
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.start.place.rank}{where}: "

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    @property
    def awaited(self) -> bool:
        """Whether its host has not reported yet."""
        return not self.host and not self.ended

    @property
    def state(self) -> ProcessState:
        return ProcessState(self.stopped)

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit code."""
        self._over.wait()
        return self._code

    def show_stacks(self) -> None:
        """Have the rank write the stacks of its threads, to the log of its host."""
        self._show_stacks(self)

    def kill(self) -> None:
        self._end(self)

    def reap(self) -> None:
        """Return at once: its host reaps it before it starts another rank."""

    def describe_exit(self, code: int) -> str:
        return f"{self.label}{describe_exit(code)}"

    def set_ended(self, code: int, reason: str = "") -> None:
        """Note the end of the rank. The first call counts."""
        if not self._over.is_set():
            self._code = code
            self.reason = reason
            self._over.set()
