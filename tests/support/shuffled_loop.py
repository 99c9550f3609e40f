"""An event loop that runs the tasks that are ready in an order that a seed decides.

asyncio runs them in the order in which they became ready. Code that is right in any order does not
depend on how long each of its awaits takes. The time of this loop passes only while nothing is
ready, so that a run is the same each time, if it uses no thread and no socket.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class ShuffledLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int) -> None:
        self._now = 0.0
        super().__init__()
        self._chance = random.Random(seed)

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        places = [place for place, handle in enumerate(ready) if _steps_a_task(handle)]
        steps = [ready[place] for place in places]
        self._chance.shuffle(steps)
        for place, handle in zip(places, steps, strict=True):
            ready[place] = handle
        super()._run_once()


def _steps_a_task(handle: asyncio.Handle) -> bool:
    """Other callbacks, such as those of transports, may rely on asyncio's order."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def run_shuffled(work: Coroutine[Any, Any, _T], seed: int) -> _T:
    loop = ShuffledLoop(seed)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
