"""The number of server processes if the operator does not set it: `--frontends auto`."""

from __future__ import annotations

# several front ends pay from this many cores on
MIN_CORES = 8
CORES_PER_FRONTEND = 4
MAX_CHOSEN = 8


def choose_count(on_gpu: bool, cores: float) -> int:
    """Return how many processes to serve with.

    On a CPU the engine needs all cores. Beside a GPU its process and the kernel need some, too.
    """
    if not on_gpu or cores < MIN_CORES:
        return 1
    return min(MAX_CHOSEN, int(cores) // CORES_PER_FRONTEND)
