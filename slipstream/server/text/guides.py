"""Checks grammars in threads of their own, with a bound on the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from slipstream.engine.constraints.constraints import LONG_GUIDE, MAX_COMPILE_SECONDS
from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.sampling_params import Guide

_SHORT_THREADS = 1
_LONG_THREADS = 2
# threads beyond these for checks that no one waits for any more, because they took too long
_MAX_ABANDONED = 4
_TOO_SLOW = f"takes over {MAX_COMPILE_SECONDS:g} s to check: make it smaller"
_BUSY = "cannot be checked now, because others take very long: send the request again later"


async def check_guide_in_thread(guide: Guide) -> None:
    """Raise GuideError if a grammar cannot be enforced, or if it takes too long to know."""
    await run_with_bound(len(guide.text), check_guide, guide)


async def run_with_bound(characters: int, function: Callable[..., None], *args: Any) -> None:
    """Run a check of grammars with this many characters. Short ones do not wait for long ones."""
    loop = asyncio.get_running_loop()
    short, long = _checks_of.setdefault(loop, (_Checks(_SHORT_THREADS), _Checks(_LONG_THREADS)))
    await (long if characters > LONG_GUIDE else short).run(function, *args)


class _Checks:
    """Runs a few checks at a time. Each has a bound on its time, from when its thread begins.

    A thread cannot be stopped. It continues after the bound, and another one takes its place.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads + _MAX_ABANDONED
        self._turns = asyncio.Semaphore(threads)
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="guides")
        self._running = 0

    async def run(self, function: Callable[..., None], *args: Any) -> None:
        async with self._turns:
            if self._running >= self._most:
                raise GuideError(_BUSY)
            self._running += 1
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, function, *args)
            running.add_done_callback(self._end)
            done, _ = await asyncio.wait([running], timeout=MAX_COMPILE_SECONDS)
            if not done:
                raise GuideError(_TOO_SLOW)
            running.result()

    def _end(self, running: asyncio.Future[None]) -> None:
        self._running -= 1
        if not running.cancelled():
            running.exception()  # no one may wait for it


_checks_of: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Checks, _Checks]] = (
    WeakKeyDictionary()
)
