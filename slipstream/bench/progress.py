"""Lines about a measurement that runs: a line that changes on a terminal, else one at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.bench.load import Load, WindowRule
from slipstream.progress import ProgressLine, looking, time_text

LINE_SECONDS = 10.0  # between two lines without a terminal
_TERMINAL_SECONDS = 0.5


@contextmanager
def shown_progress(load: Load, count: int, windows: WindowRule) -> Iterator[None]:
    """Show how far a measurement has come while the body waits for it.

    count: of its requests; 0: it is measured in windows
    """
    line = ProgressLine() if sys.stderr.isatty() else None
    began = time.monotonic()

    def look() -> None:
        done = len(load.records())
        text = progress_text(done, time.monotonic() - began, count, windows)
        if line is None:
            print(f"[INFO] {text}", flush=True)
        else:
            line.show(text, done, count)

    try:
        with looking(look, LINE_SECONDS if line is None else _TERMINAL_SECONDS, "bench progress"):
            yield
    finally:
        if line is not None:
            line.clear()


def progress_text(done: int, seconds: float, count: int, windows: WindowRule) -> str:
    """Return a line: requests answered, their rate, and the time left."""
    rate = done / seconds
    if count:
        left = f", {time_text((count - done) / rate)} left" if done else ""
        return f"{done} of {count} requests in {time_text(seconds)}, {rate:.1f}/s{left}"
    least = 3 * windows.seconds
    rest = f"{time_text(least - seconds)} left" if seconds < least else "until windows are equal"
    return f"{done} requests in {time_text(seconds)}, {rate:.1f}/s, {rest}"
