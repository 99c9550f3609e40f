"""Measure this machine's fastest memory read and bf16 GEMM, in the environment of the engine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from slipstream.engine.settings import EngineSettings
from slipstream.engine_worker import cpu_probe

READ_BYTES = 1 << 30  # much larger than any cache
MATRIX = 2048
REPEATS = 5


def main() -> None:
    settings = cpu_probe.prepare(EngineSettings(device="cpu"), None)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    stream = torch.ones(READ_BYTES // 4)
    a, b = (torch.randn(MATRIX, MATRIX).to(getattr(torch, settings.dtype)) for _ in range(2))
    for _ in sys.stdin:
        read = _best(stream.sum)
        gemm = _best(lambda: torch.mm(a, b))
        print(
            json.dumps({"bandwidth": READ_BYTES / read, "operations": 2 * MATRIX**3 / gemm}),
            flush=True,
        )


def _best(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
