"""The requests that wait for a row, and those that wait for another request's prompt.

Of several requests with the same prompt, the first computes it. The others wait until it is
computed, and then start from its blocks. No torch here.
"""

from __future__ import annotations

import heapq

from slipstream.engine.request import Request


class WaitingQueue:
    """Requests that wait for a row: higher priority first, then in order of arrival."""

    def __init__(self) -> None:
        # (-priority, arrival, tokens, request)
        self._heap: list[tuple[int, int, int, Request]] = []
        # tokens of all of them; cancelled ones count until they would be next
        self.tokens = 0

    def push(self, *requests: Request) -> None:
        for request in requests:
            tokens = len(request.tokens)
            self.tokens += tokens
            entry = (-request.submitted.priority, request.arrival, tokens, request)
            heapq.heappush(self._heap, entry)

    def first(self) -> Request | None:
        """Return the next request without removing it."""
        while self._heap:
            request = self._heap[0][3]
            if request.finish_reason is None:
                return request
            self.pop()  # cancelled while it waited
        return None

    def pop(self) -> None:
        _, _, tokens, _ = heapq.heappop(self._heap)
        self.tokens -= tokens


def share_prompt(request: Request, source: Request | None) -> bool:
    """Share the prompt of a live request with a new one, if they are compatible.

    Returns True when the new request must wait until `source` has computed the prompt.
    """
    if source is None or not _can_share(request, source):
        return False
    request.prompt_source = source
    if _has_prompt(source):
        return False
    source.dependents.append(request)
    return True


def _can_share(request: Request, source: Request) -> bool:
    if source.group is not None or request.group is not None or request.sampling.uses_whole_prompt:
        return False
    new = request.submitted
    old = source.submitted
    return (
        new.prompt == old.prompt
        and new.adapter == old.adapter
        and new.cache_salt == old.cache_salt
        and new.prompt_table == old.prompt_table
    )


def release_dependents(source: Request, over: bool = False) -> list[Request]:
    """Return the requests that need not wait for this prompt any more: it is computed, or its
    request is over.
    """
    if not over and not _has_prompt(source):
        return []
    waiting = source.dependents
    source.dependents = []
    return [request for request in waiting if request.finish_reason is None]


def usable_prompt_source(request: Request) -> Request | None:
    """Return the request whose blocks this one can start from now. None after a preemption."""
    source = request.prompt_source
    if source is None or source.row < 0 or request.epoch >= 0 or not _has_prompt(source):
        return None
    return source


def _has_prompt(source: Request) -> bool:
    """Return whether the prompt is computed except for its last token, from which each request
    samples its own first token.
    """
    return source.committed >= source.prompt_tokens - 1
