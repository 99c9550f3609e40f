"""Progress of `slipstream.LLM`: of a batch, and of building and loading a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from slipstream.progress import PhaseProgress, ProgressLine, time_text


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
            text += f", {time_text(seconds / own * (self._total - self.done))} left"
        elif self.done == self._total:
            text += f", in {time_text(seconds)}"
        self._line.show(text, self.done, self._total)


class LoadProgress:
    """Shows the phases of fetching and building a model, if they are to be shown."""

    def __init__(self, shown: bool, say: Callable[[str], None] | None = None) -> None:
        self._display = PhaseProgress(say or _say, ProgressLine()) if shown else None

    def update(self, phase: str, done: int, total: int) -> None:
        """Take the progress that functions of weights/ report. total 0: of unknown length"""
        if self._display is not None:
            self._display.update(phase, done, total)

    def say(self, text: str) -> None:
        """Write a line, if progress is shown."""
        if self._display is not None:
            self._display.say(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
