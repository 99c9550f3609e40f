"""Progress in a terminal, a notebook or a log: a line that changes, or plain lines."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR_COLUMNS = 24  # most columns between the brackets of a bar
_LEAST_BAR_COLUMNS = 8  # a line without room for these has no bar
_INTERVAL_SECONDS = 0.1  # between two lines
_PLAIN_STEPS = 10  # most plain lines of a phase
_PLAIN_SECONDS = 1.0  # between two plain lines


def is_shown(wanted: bool | None) -> bool:
    """Return whether progress is shown. None: in a terminal or a notebook."""
    if wanted is not None:
        return wanted
    # a notebook's kernel writes to a page, which is no terminal
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def fitted_line(text: str, done: int, total: int, columns: int) -> str:
    """Return a text with a bar that fits into these columns. Without room there is no bar; a
    text that is longer still loses its middle.
    """
    bar = min(_BAR_COLUMNS, columns - len(text) - len("[] "))
    if total and bar >= _LEAST_BAR_COLUMNS:
        filled = bar * min(done, total) // total
        return f"[{'#' * filled:<{bar}}] {text}"
    if len(text) <= columns:
        return text
    head = max(0, (columns - 1) // 3)
    return f"{text[:head]}…{text[len(text) - (columns - 1 - head) :]}"


class ProgressLine:
    """A line that the next line replaces. It never wraps to a second row."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output
        self._length = 0  # characters of the last line
        self._written = 0.0  # time of the last line

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """Write a text, with a bar if `total` is not 0.

        A line that follows another one at once is left out, but never the last one.
        """
        now = time.monotonic()
        if done < total and now - self._written < _INTERVAL_SECONDS:
            return
        self._written = now
        # a character in the last column would move the cursor to the next row
        line = fitted_line(text, done, total, self._columns() - 1)
        self._write("\r" + line.ljust(self._length))
        self._length = len(line)

    def end(self) -> None:
        """Go to the next line, if one was written."""
        if self._length:
            self._write("\n")
            self._length = 0

    def clear(self) -> None:
        """Remove the line, if one was written."""
        if self._length:
            self._write(f"\r{'':<{self._length}}\r")
            self._length = 0

    def _columns(self) -> int:
        try:
            own = os.get_terminal_size((self._output or sys.stderr).fileno()).columns
        except OSError:  # no terminal, as in a notebook
            own = 0
        return own or shutil.get_terminal_size().columns

    def _write(self, text: str) -> None:
        output = self._output or sys.stderr
        output.write(text)
        output.flush()


class PhaseProgress:
    """Shows phases that are measured in bytes, with their rate and the time left.

    `line` is the line that changes. Without one, `say` gets plain lines.
    """

    def __init__(self, say: Callable[[str], None], line: ProgressLine | None) -> None:
        self._tell = say
        self._line = line
        self._phase = ""
        self._began = 0.0
        self._steps = 0  # tenths of this phase that the last plain line told
        self._told = 0.0  # time of the last plain line

    def update(self, phase: str, done: int, total: int) -> None:
        """Take the progress that functions of weights/ report. total 0: of unknown length"""
        if phase != self._phase:
            self._begin(phase, total)
        if total and self._line is not None:
            self._line.show(f"{phase}: {self._figures(done, total)}", done, total)
            if done >= total:
                self._line.end()
        elif total and self._is_due(done, total):
            self._steps = done * _PLAIN_STEPS // total
            self._told = time.monotonic()
            self.say(f"{phase}: {done * 100 // total}%, {self._figures(done, total)}")

    def say(self, text: str) -> None:
        """Write a line of its own."""
        self.end()
        self._tell(text)

    def end(self) -> None:
        """Go to the next line of the terminal, if this one shows progress."""
        if self._line is not None:
            self._line.end()

    def _is_due(self, done: int, total: int) -> bool:
        """Return whether a plain line is due: for a further tenth, not too often, and the last."""
        if done * _PLAIN_STEPS // total <= self._steps:
            return False
        return done >= total or time.monotonic() - self._told >= _PLAIN_SECONDS

    def _begin(self, phase: str, total: int) -> None:
        self.end()
        self._phase = phase
        self._began = self._told = time.monotonic()
        self._steps = 0
        if not total:
            self.say(phase[:1].upper() + phase[1:])
        elif self._line is None:
            self.say(f"{phase}: {size_text(total)}")

    def _figures(self, done: int, total: int) -> str:
        """Return bytes, rate and the time left, or the time taken."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        text = f"{size_text(done, total)}/{size_text(total)}"
        if not done:
            return text
        text += f", {size_text(done / seconds)}/s"
        if done >= total:
            return f"{text}, {seconds:.1f} s"
        return f"{text}, {time_text(seconds / done * (total - done))} left"


@contextmanager
def looking(look: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Call `look` at intervals while the body runs, in a thread of this name."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(seconds):
            look()

    watcher = threading.Thread(target=watch, name=name, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def size_text(count: float, unit_of: float | None = None) -> str:
    """Return a number of bytes as people read it: 259.0 MB, 16.06 GB.

    unit_of: a number that is shown with its unit beside this one, which takes the same without it
    """
    if (unit_of or count) >= 1e9:
        text = f"{count / 1e9:.2f}"
        unit = " GB"
    else:
        text = f"{count / 1e6:.1f}"
        unit = " MB"
    return text if unit_of else text + unit


def time_text(seconds: float) -> str:
    """Return a duration as people read it: 8 s, 2:05, 1:00:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
