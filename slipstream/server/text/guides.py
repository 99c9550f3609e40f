"""Checks grammars in threads of their own, with a bound on the time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slipstream.engine.constraints.constraints import LONG_GUIDE, MOST_COMPILE_SECONDS
from slipstream.engine.constraints.guided import GuideError, check_guide
from slipstream.engine.sampling_params import Guide

_LONG_THREADS = 2


async def check_guide_in_thread(guide: Guide) -> None:
    """Raise GuideError if a grammar cannot be enforced, or if it takes too long to know."""
    await run_with_bound(len(guide.text), check_guide, guide)


async def run_with_bound(characters: int, function: Callable[..., None], *args: Any) -> None:
    """Run a check of grammars with this many characters. Short ones do not wait for long ones."""
    executor = _executor("long" if characters > LONG_GUIDE else "short")
    running = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    try:
        # the thread goes on: the library bounds the size of a grammar, and so its time
        await asyncio.wait_for(running, MOST_COMPILE_SECONDS)
    except TimeoutError:
        text = f"takes over {MOST_COMPILE_SECONDS:g} s to check: make it smaller"
        raise GuideError(text) from None


@functools.cache
def _executor(kind: str) -> ThreadPoolExecutor:
    threads = _LONG_THREADS if kind == "long" else 1
    return ThreadPoolExecutor(threads, thread_name_prefix=f"{kind}-guides")
