"""Lines about a measurement that runs: a line that changes on a terminal, else one at intervals."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.bench.load import Load, WindowRule

LINE_SECONDS = 10.0  # between two lines without a terminal
_TERMINAL_SECONDS = 0.5
_WIDTH = 78  # of the line that changes


@contextmanager
def shown_progress(load: Load, count: int, windows: WindowRule) -> Iterator[None]:
    """Show how far a measurement has come while the body waits for it.

    count: of its requests; 0: it is measured in windows
    """
    ended = threading.Event()
    terminal = sys.stderr.isatty()

    def watch() -> None:
        began = time.monotonic()
        while not ended.wait(_TERMINAL_SECONDS if terminal else LINE_SECONDS):
            seconds = time.monotonic() - began
            text = progress_text(len(load.records()), seconds, count, windows)
            if terminal:
                sys.stderr.write(f"\r{text[:_WIDTH]:<{_WIDTH}}")
                sys.stderr.flush()
            else:
                print(f"[INFO] {text}", flush=True)
        if terminal:
            sys.stderr.write(f"\r{'':<{_WIDTH}}\r")
            sys.stderr.flush()

    watcher = threading.Thread(target=watch, name="bench progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def progress_text(done: int, seconds: float, count: int, windows: WindowRule) -> str:
    """Return a line: requests answered, their rate, and the time left."""
    rate = done / seconds
    if count:
        left = f", {(count - done) / rate:.0f} s left" if done else ""
        return f"{done} of {count} requests in {seconds:.0f} s, {rate:.1f} a second{left}"
    least = 3 * windows.seconds
    rest = f"{least - seconds:.0f} s left" if seconds < least else "until windows are equal"
    return f"{done} requests in {seconds:.0f} s, {rate:.1f} a second, {rest}"
