"""Progress in a terminal or a notebook: one line that is written again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24  # characters of the bar
_INTERVAL_SECONDS = 0.1  # between two lines


def is_shown(wanted: bool | None) -> bool:
    """Return whether progress is shown. None: in a terminal or a notebook."""
    if wanted is not None:
        return wanted
    # a notebook's kernel writes to a page, which is no terminal
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class ProgressLine:
    """A line with a bar, which the next line replaces.

    It needs no width of a terminal, and works wherever a carriage return does.
    """

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output
        self._length = 0  # characters of the last line
        self._written = 0.0  # time of the last line

    def show(self, text: str, done: int, total: int) -> None:
        """Write the line, unless one was written a moment ago. The last one is always written."""
        now = time.monotonic()
        if done < total and now - self._written < _INTERVAL_SECONDS:
            return
        self._written = now
        filled = _WIDTH * done // total if total else _WIDTH
        line = f"[{'#' * filled:<{_WIDTH}}] {text}"
        self._write("\r" + line.ljust(self._length))
        self._length = len(line)

    def end(self) -> None:
        """Go to the next line, if one was written."""
        if self._length:
            self._write("\n")
            self._length = 0

    def _write(self, text: str) -> None:
        output = self._output or sys.stderr
        output.write(text)
        output.flush()


class BatchProgress:
    """Counts the finished requests of a batch, with rates and the time left."""

    def __init__(self, what: str, total: int, shown: bool, done: int = 0) -> None:
        """what: the name of what is counted. done: those of an earlier run"""
        self.done = done
        self.tokens = 0  # generated so far
        self._what = what
        self._total = total
        self._before = done
        self._line = ProgressLine() if shown else None
        self._began = time.monotonic()

    def __enter__(self) -> BatchProgress:
        self._show()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._line is not None:
            self._line.end()

    def add(self, tokens: int = 0) -> None:
        """Count one finished request and its generated tokens."""
        self.done += 1
        self.tokens += tokens
        self._show()

    def _show(self) -> None:
        if self._line is None:
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        own = self.done - self._before
        text = f"{self.done:,}/{self._total:,} {self._what}, {own / seconds:.1f}/s"
        if self.tokens:
            text += f", {self.tokens / seconds:,.0f} tokens/s"
        if own and self.done < self._total:
            text += f", {_time(seconds / own * (self._total - self.done))} left"
        elif self.done == self._total:
            text += f", in {_time(seconds)}"
        self._line.show(text, self.done, self._total)


class LoadProgress:
    """Shows the phases of fetching and building a model, with bytes, rate and time left."""

    def __init__(self, shown: bool, say: Callable[[str], None] | None = None) -> None:
        self._line = ProgressLine() if shown else None
        self._say = say or _say
        self._phase = ""
        self._began = 0.0

    def update(self, phase: str, done: int, total: int) -> None:
        """Take the progress that functions of weights/ report. total 0: of unknown length"""
        if self._line is None:
            return
        if phase != self._phase:
            self._line.end()
            self._phase = phase
            self._began = time.monotonic()
        if not total:
            self._say(phase[:1].upper() + phase[1:])
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        text = f"{phase}: {done / 1e6:,.0f}/{total / 1e6:,.0f} MB, {done / seconds / 1e6:,.0f} MB/s"
        if 0 < done < total:
            text += f", {_time(seconds / done * (total - done))} left"
        self._line.show(text, done, total)
        if done >= total:
            self._line.end()

    def say(self, text: str) -> None:
        """Write a line, if progress is shown."""
        if self._line is not None:
            self._line.end()
            self._say(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _time(seconds: float) -> str:
    """Return a duration as people read it: 8 s, 2:05, 1:00:00."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
