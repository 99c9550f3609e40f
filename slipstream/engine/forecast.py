"""How many blocks running requests come to hold at most, when those that end make room for those
that grow.

Every step gives each decoding request one token: decoding requests come first in a step, and a step
has room for all of them. So the steps to a request's limit say when its blocks come back at the
latest, and how far others have grown by then. Ending earlier only helps. A request in the midst of
its prompt may be held up, so that nothing is known of when it ends; neither is it of one that
guesses ahead, waits for masks or has beams. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from slipstream.engine.request import Request

# steps from a request's last one until its blocks are known to be free: two may be under way
_LATE = 3


class Forecast:
    """Of the requests that run while one plan is made."""

    def __init__(
        self, requests: Iterable[Request], block_tokens: int, most_blocks: Callable[[Request], int]
    ) -> None:
        """most_blocks: what a request holds at most, whenever that is"""
        self._block_tokens = block_tokens
        self._kept = 0  # blocks of requests of which it is not known when they end
        decoding = []
        for request in requests:
            if request.deficit > 1 or at_own_pace(request):
                self._kept += most_blocks(request)
            else:
                decoding.append((request.computed, request.limit))
        self._decoding = np.array(decoding, dtype=np.int64).reshape(-1, 2)

    def most(self, blocks: int, decoding: tuple[int, int] | None) -> int:
        """Blocks held at most at once if one more request came, which holds up to `blocks`;
        decoding: the tokens that it has computed and its limit, where all of its prompt is computed
        at once.
        """
        if decoding is None:
            return self._kept + blocks + self._peak(self._decoding)
        return self._kept + self._peak(np.vstack((self._decoding, decoding)))

    def add(self, blocks: int, decoding: tuple[int, int] | None) -> None:
        if decoding is None:
            self._kept += blocks
        else:
            self._decoding = np.vstack((self._decoding, decoding))

    def _peak(self, decoding: np.ndarray) -> int:
        """At a request's end, all that end no earlier are there, one token a step longer than now."""
        left = decoding[:, 1] - decoding[:, 0]
        order = np.argsort(-left)
        count = np.arange(1, len(order) + 1)
        grown = np.cumsum(decoding[order, 0]) + count * (left[order] + _LATE)
        # each may have a block that is not full
        return int((grown // self._block_tokens + count).max(initial=0))


def at_own_pace(request: Request) -> bool:
    return request.drafter is not None or request.group is not None or request.lockstep
