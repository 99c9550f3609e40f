"""Progress of a long command: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

from slipstream.progress import PhaseProgress, ProgressLine

_FETCH = "fetching "  # phases with this beginning read a source; the others write


class ProgressLines:
    """Shows the progress that functions of weights/ report to `update`."""

    def __init__(
        self, say: Callable[[str], None] = lambda text: print(f"[INFO] {text}", flush=True)
    ) -> None:
        self.built = False  # something was written, not only found
        self._display = PhaseProgress(say, ProgressLine() if sys.stderr.isatty() else None)

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *failure: object) -> None:
        self._display.end()

    def update(self, phase: str, done: int, total: int) -> None:
        if total and not phase.startswith(_FETCH):
            self.built = True
        self._display.update(phase, done, total)
