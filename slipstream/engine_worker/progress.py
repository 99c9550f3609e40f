"""Logs how far the start of an engine has come."""

from __future__ import annotations

import logging

logger = logging.getLogger("slipstream.engine_worker.process")


def show_progress(phase: str, done: int, total: int) -> None:
    """Log the start of a phase and each quarter of it.

    These are lines in a terminal, too: other processes of the server write to it meanwhile.
    """
    if not done:
        logger.info("%s", phase)
    elif 4 * done // total > 4 * (done - 1) // total:
        logger.info("%s: %s", phase, "done" if total == 1 else f"{done} of {total}")
