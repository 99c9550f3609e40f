"""The times of the phases of a start, and log lines during it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from slipstream.server.log.process_state import read_age

logger = logging.getLogger(__name__)

REPORT_SECONDS = 5.0  # between two lines while models load


class StartTimes:
    """Seconds of the phases of a start, in order. A phase ends where the next one begins."""

    def __init__(self, prepare_seconds: float = 0.0) -> None:
        """`prepare_seconds`: of the time so far, spent on the import and build of a model."""
        self._prepare_seconds = prepare_seconds
        self._spawned = read_age()
        self._loaded = self._spawned

    def engines_spawned(self) -> None:
        self._spawned = read_age()

    def models_loaded(self) -> None:
        self._loaded = read_age()

    def describe(self, load_seconds: Iterable[float]) -> str:
        """Return how long the start took and its phases.

        load_seconds: of each engine. They load in parallel, so the slowest counts.
        """
        whole = read_age()
        load = max(load_seconds, default=0.0)
        phases = {
            "model import": self._prepare_seconds,
            "program": self._spawned - self._prepare_seconds,
            "engine process": max(0.0, self._loaded - self._spawned - load),
            "model load": load,
            "ports": whole - self._loaded,
        }
        parts = [f"{name} {seconds:.1f} s" for name, seconds in phases.items() if seconds >= 0.05]
        return f"Ready:    in {whole:.1f} s: {', '.join(parts)}"


async def report_loading(names: Iterable[str]) -> None:
    """Log every few seconds that these models still load, until it is cancelled."""
    began = time.monotonic()
    listed = ", ".join(names)
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        logger.info("still loading %s: %.0f s so far", listed, time.monotonic() - began)
