"""The longest time that the end of a server may take.

The parts of a server end one after the other on the event loop, each with a bound of its own. Some
work cannot be bounded there: a thread that checks a grammar goes on until it is done, and the
interpreter waits for it. A thread of this module ends the process if the parts do not.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# time, after the exit timeout, when the process ends with what still runs
LAST_SECONDS = 1.75
# time for the interpreter to end once all parts of the server have: threads may still run
FINISH_SECONDS = 0.5


class ExitDeadline:
    """Ends the process at a time, unless it has ended before."""

    def __init__(self, kill: Callable[[], None]) -> None:
        """`kill`: ends all other processes of the server; it is called from another thread."""
        self.part = ""  # the part of the server that is ending, for the log
        self._kill = kill
        self._code = 0
        self._time = math.inf
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def seconds(self) -> float:
        """The seconds left until the process ends."""
        return self._time - time.monotonic()

    def set(self, seconds: float, code: int) -> None:
        """End the process with this exit code after this time, or at an earlier time set before."""
        with self._changed:
            self._time = min(self._time, time.monotonic() + seconds)
            self._code = code
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="exit deadline", daemon=True)
            self._thread.start()

    def finish(self, code: int) -> None:
        """Note that all parts have ended. Only threads may still run."""
        self.part = ""
        self.set(FINISH_SECONDS, code)

    def _wait(self) -> None:
        with self._changed:
            while self.seconds > 0:
                self._changed.wait(None if self._time == math.inf else self.seconds)
        threads = [
            thread.name
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread()
        ]
        running = [f"the end of {self.part}"] if self.part else []
        if running or threads:
            logger.warning(
                "the server ends although this has not ended: %s", ", ".join(running + threads)
            )
        try:
            self._kill()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self._code)
