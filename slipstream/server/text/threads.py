"""Work that grows with the size of a request runs in a thread when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

# Characters (or bytes, or values). Work on more of them would delay the streams of other requests
# if it ran on the event loop.
THREAD_ABOVE_SIZE = 8192

Result = TypeVar("Result")


async def in_thread_if_long(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Return function(*args); compute it in a thread where `size` is over THREAD_ABOVE_SIZE."""
    if size > THREAD_ABOVE_SIZE:
        return await asyncio.to_thread(function, *args)
    return function(*args)
