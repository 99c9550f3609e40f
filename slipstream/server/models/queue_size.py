"""The default bound on the requests that wait for an engine.

Without one, a burst of requests would take all memory, and the last of them would wait for hours.
"""

from __future__ import annotations

from functools import lru_cache

from slipstream.engine.memory.host import read_host_memory

_LEAST = 4096  # a burst of a load test fits
_ROUNDS = 64  # times that all rows are filled from a full queue
_MEMORY_SHARE = 8  # waiting requests may fill this part of the memory: an eighth
_TOKEN_BYTES = 80  # of a prompt: a list in the server's process and one in the engine's
_REQUEST_BYTES = 64 << 10  # its connection, its tasks and its other fields


@lru_cache(maxsize=256)
def default_queue_size(rows: int, sequence_tokens: int, memory_bytes: int = 0) -> int:
    """Return how many requests may wait for an engine whose configuration does not say.

    rows: requests that run at once
    sequence_tokens: the longest sequence
    memory_bytes: of the machine; 0: of this one
    """
    memory_bytes = memory_bytes or read_host_memory().total
    longest_bytes = _REQUEST_BYTES + sequence_tokens * _TOKEN_BYTES
    fitting = memory_bytes // _MEMORY_SHARE // longest_bytes
    return max(rows, min(fitting, max(_LEAST, _ROUNDS * rows)))
