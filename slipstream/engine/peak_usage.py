"""An upper bound on the blocks that running requests hold at once, given that some of them end
before others have grown to their limit. No torch here.

Every step computes one token of each decoding request: decoding requests come first in a step, and
a step has room for all of them. We know in how many steps each request reaches its limit, so we
know the latest step at which it frees its blocks. Finishing earlier only lowers the peak.

No end can be predicted for a request that is still computing its prompt, because others may delay
it, nor for one that has draft tokens, constraints or beams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from slipstream.engine.request import Request

# Steps from a request's last one until its blocks are free: two plans may be in flight.
_LATENCY_STEPS = 3


class DecodeSpan(NamedTuple):
    """A request that decodes one token in every step."""

    scheduled: int  # tokens scheduled now
    limit: int  # tokens at its end


class PeakUsage:
    """The peak of the requests that run while one plan is built."""

    def __init__(
        self, requests: Iterable[Request], block_tokens: int, max_blocks: Callable[[Request], int]
    ) -> None:
        """max_blocks: returns the most blocks that a request holds at any time"""
        self._block_tokens = block_tokens
        self._held = 0  # blocks of requests whose end cannot be predicted
        decoding = []
        for request in requests:
            if request.deficit > 1 or is_unpredictable(request):
                self._held += max_blocks(request)
            else:
                decoding.append((request.scheduled, request.limit))
        self._decoding = np.array(decoding, dtype=np.int64).reshape(-1, 2)

    def with_request(self, blocks: int, decoding: DecodeSpan | None) -> int:
        """Return the peak if one more request ran, which holds up to `blocks` blocks.

        `decoding`: its span, if its whole prompt is computed in the step that admits it.
        """
        if decoding is None:
            return self._held + blocks + self._peak(self._decoding)
        return self._held + self._peak(np.vstack((self._decoding, decoding)))

    def add(self, blocks: int, decoding: DecodeSpan | None) -> None:
        if decoding is None:
            self._held += blocks
        else:
            self._decoding = np.vstack((self._decoding, decoding))

    def _peak(self, decoding: np.ndarray) -> int:
        """Return the peak of decoding requests [n, 2].

        The peak is at the end of some request. All that end no earlier are still there, and have
        grown by one token a step.
        """
        remaining = decoding[:, 1] - decoding[:, 0]
        order = np.argsort(-remaining)
        count = np.arange(1, len(order) + 1)
        tokens = np.cumsum(decoding[order, 0]) + count * (remaining[order] + _LATENCY_STEPS)
        # Each request may have a block that is not full.
        return int((tokens // self._block_tokens + count).max(initial=0))


def is_unpredictable(request: Request) -> bool:
    """Return whether the request may decode fewer or more than one token a step."""
    return request.proposer is not None or request.group is not None or request.needs_host_result
