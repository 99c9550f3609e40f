"""Report the progress of a download that another program or library carries out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.progress import looking
from slipstream.weights.stream import Progress

_SECONDS = 0.25  # between two looks


@contextmanager
def watched_fetch(
    phase: str, total: int, fetched: Callable[[], int], progress: Progress
) -> Iterator[None]:
    """Report the bytes that `fetched` returns while the body runs, and all of them at its end.

    total: bytes in all. If the body fails, the last report stays.
    """

    def look() -> None:
        # a file may be larger than the index says; only the end of the body is the end
        progress(phase, min(fetched(), total - 1), total)

    progress(phase, 0, total)
    with looking(look, _SECONDS, "watch fetch"):
        yield
    progress(phase, total, total)
