"""Progress of a long command: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PLAIN_STEPS = 10  # lines per phase without a terminal
_FETCH = "fetching "  # phases with this beginning read a source; the others write


class ProgressLines:
    """Shows the progress that functions of weights/ report to `update`."""

    def __init__(
        self, say: Callable[[str], None] = lambda text: print(f"[INFO] {text}", flush=True)
    ) -> None:
        self.built = False  # something was written, not only found
        self._say = say
        self._phase = ""
        self._started = 0.0
        self._shown = 0
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )

    def __enter__(self) -> ProgressLines:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        if not total:  # a phase of unknown length
            self._say(phase[:1].upper() + phase[1:])
            return
        if not phase.startswith(_FETCH):
            self.built = True
        if phase != self._phase:
            self._begin(phase, total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
        elif done * _PLAIN_STEPS // total > self._shown:
            self._shown = done * _PLAIN_STEPS // total
            self._say(f"{phase}: {self._progress(done, total)}")

    def _begin(self, phase: str, total: int) -> None:
        self._phase = phase
        self._started = time.monotonic()
        self._shown = 0
        if self._bar is not None:
            self._task = self._bar.add_task(phase, total=total)
            return
        action = "fetch" if phase.startswith(_FETCH) else "write"
        self._say(f"{phase}: {size_text(total)} to {action}")

    def _progress(self, done: int, total: int) -> str:
        seconds = max(time.monotonic() - self._started, 1e-3)
        if done >= total:
            rate = size_text(total / seconds)
            return f"100%, {size_text(total)} of {size_text(total)}, {rate}/s, {seconds:.1f} s"
        left = seconds * (total - done) / done
        return (
            f"{done * 100 // total}%, {size_text(done)} of {size_text(total)}, "
            f"{size_text(done / seconds)}/s, {left:.0f} s left"
        )


def size_text(count: float) -> str:
    """Return a number of bytes as people read it: 259.0 MB, 16.06 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
