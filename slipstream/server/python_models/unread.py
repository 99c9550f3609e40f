"""How much may have been answered that nobody has read. Whoever sends knows, and is held up at
that.

A model's process holds up the answers to its requests, the server those to its calls of other
models.
"""

from __future__ import annotations

from collections import deque

MOST_BYTES = 4 << 20  # of one request or call; thousands of short answers, or one of any size
# that a sender is held up while nothing is read: others may wait for the thread it runs in
PATIENCE_SECONDS = 60.0
_MARK_BYTES = MOST_BYTES // 64  # between two marks
_ANSWER_BYTES = 512  # what the objects of each answer take besides


class Unread:
    """What one request's answers weigh that were sent and are not known to have been read.

    The reader says when it reaches a mark among them: to say so of each answer would cost as much
    as sending it.
    """

    def __init__(self) -> None:
        self.total = 0
        self._since_mark = 0
        self._up_to_marks: deque[int] = deque()  # the weight that each mark stands for

    @property
    def full(self) -> bool:
        """There is always a mark among what made it so, because there is one in every
        `_MARK_BYTES`.
        """
        return self.total >= MOST_BYTES

    def add(self, frame_bytes: int) -> bool:
        """One answer. True where a mark is to follow it."""
        self.total += frame_bytes + _ANSWER_BYTES
        self._since_mark += frame_bytes + _ANSWER_BYTES
        if self._since_mark < _MARK_BYTES:
            return False
        self._up_to_marks.append(self._since_mark)
        self._since_mark = 0
        return True

    def read(self) -> None:
        """Up to the oldest mark."""
        self.total -= self._up_to_marks.popleft()
