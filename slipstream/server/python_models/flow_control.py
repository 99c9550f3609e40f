"""Flow control: bounds the bytes sent per request that the reader has not consumed.

The sender keeps the count and blocks at the limit. A model's process is the sender of the responses
to its requests, the server of the responses to a model's calls of other models.
"""

from __future__ import annotations

from collections import deque

# Bytes of one request or call: thousands of short responses, or one of any size.
WINDOW_BYTES = 4 << 20
# Seconds that a sender blocks while nothing is read. Other work may wait for its thread.
STALL_SECONDS = 60.0
_MARKER_BYTES = WINDOW_BYTES // 64  # bytes between two markers
_RESPONSE_BYTES = 512  # overhead of the objects of each response


class FlowControl:
    """Counts the bytes of one request's responses that were sent and not yet acknowledged.

    The sender puts markers between the responses, and the reader acknowledges a marker when it
    reaches it. An acknowledgement of each response would cost as much as sending it.
    """

    def __init__(self) -> None:
        self.unread = 0  # bytes
        self._since_marker = 0
        self._markers: deque[int] = deque()  # bytes up to each marker that is not acknowledged

    @property
    def full(self) -> bool:
        """Return whether the sender has to wait. Then at least one marker is on its way."""
        return self.unread >= WINDOW_BYTES

    def sent(self, frame_bytes: int) -> bool:
        """Count one response. Returns whether a marker must follow it."""
        self.unread += frame_bytes + _RESPONSE_BYTES
        self._since_marker += frame_bytes + _RESPONSE_BYTES
        if self._since_marker < _MARKER_BYTES:
            return False
        self._markers.append(self._since_marker)
        self._since_marker = 0
        return True

    def acknowledged(self) -> None:
        """Take note that the reader has reached the oldest marker."""
        self.unread -= self._markers.popleft()
