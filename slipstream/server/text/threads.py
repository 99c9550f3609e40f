"""Work that grows with the size of a request runs in a thread when it is long."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# Characters (or bytes, or values). Work on more of them would delay the streams of other requests
# if it ran on the event loop.
THREAD_ABOVE_SIZE = 8192
# Work on more than this has threads of its own, so that shorter work does not wait for it.
LARGE_SIZE = 1 << 18
_LARGE_THREADS = 2
# Seconds for which a thread may keep the interpreter's lock while the event loop waits for it.
_SWITCH_SECONDS = 0.001

Result = TypeVar("Result")


async def in_thread_if_long(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Return function(*args); compute it in a thread where `size` is over THREAD_ABOVE_SIZE."""
    if size <= THREAD_ABOVE_SIZE:
        return function(*args)
    _prepare_threads()
    executor = _large_executor() if size > LARGE_SIZE else None
    call = functools.partial(contextvars.copy_context().run, function, *args)
    return await asyncio.get_running_loop().run_in_executor(executor, call)


@functools.cache
def _prepare_threads() -> None:
    sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))


@functools.cache
def _large_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_LARGE_THREADS, thread_name_prefix="large-request")
