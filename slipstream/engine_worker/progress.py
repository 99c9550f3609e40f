"""Shows how far the start of an engine has come."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("slipstream.engine_worker.process")


def show_progress(phase: str, done: int, total: int) -> None:
    """Show how far a phase of the start has come: a bar on a terminal, a line each quarter
    elsewhere.
    """
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        sys.stderr.write(f"\r  {phase:<24} [{bar:<30}] {done}/{total}" + "\n" * (done == total))
        sys.stderr.flush()
    elif 4 * done // total > 4 * (done - 1) // total:
        logger.info("%s: %d of %d", phase, done, total)
