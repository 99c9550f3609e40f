"""A team of threads that compute steps together.

The threads stay in compiled code. Between steps they spin briefly and then sleep, so that an idle
engine uses no CPU. The thread that calls `run` is one of the team.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from slipstream.kernels.cpu import layout
from slipstream.kernels.cpu.memory import aligned
from slipstream.kernels.cpu.objects import Code, function_of
from slipstream.kernels.cpu.records import Team as Offsets
from slipstream.kernels.cpu.records import Thread

# About 50 microseconds on current machines: several times what threads wait for each other.
_SPINS = 2000


class Team:
    def __init__(self, code: Code, threads: int, row_bytes: int, spins: int = _SPINS) -> None:
        """row_bytes: of the longest float32 row that an operation handles"""
        self.size = threads
        self._launch = function_of(code.launch)
        self._serve = function_of(code.serve)
        self._lock = threading.Lock()
        self.code = code
        self._shared = aligned(int(Offsets.COUNTERS) + layout.RINGS * threads * layout.LINE)
        self._shared_fields = self._shared.view(np.int64)
        self._shared_fields[int(Offsets.SPINS) // 8] = spins
        self._records = aligned(threads * 8 * int(Thread.SIZE)).view(np.int64).reshape(threads, -1)
        self._memory = aligned(threads * layout.thread_bytes(row_bytes))
        for index in range(threads):
            self._fill(index, row_bytes)
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(self._address(index),),
                name=f"slipstream-cpu-{index}",
                daemon=True,
            )
            for index in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()
        kept = (self._shared, self._records, self._memory, code)
        self._end = weakref.finalize(
            self, _stop, self._shared_fields, self._launch, self._address(0), self._threads, kept
        )

    def _fill(self, index: int, row_bytes: int) -> None:
        record = self._records[index]
        memory = self._memory.ctypes.data + index * layout.thread_bytes(row_bytes)
        record[Thread.INDEX] = index
        record[Thread.THREADS] = self.size
        record[Thread.TEAM] = self._shared.ctypes.data
        record[Thread.TILE] = memory
        record[Thread.ATTENTION] = memory + layout.TILE_BYTES
        record[Thread.ROW] = memory + layout.TILE_BYTES + layout.ATTENTION_BYTES

    def _address(self, index: int) -> int:
        return int(self._records[index].ctypes.data)

    def run(self, context: int) -> None:
        """Compute the step whose context is at this address."""
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the threads of this engine have ended")
            self._shared_fields[int(Offsets.JOB) // 8] = context
            self._launch(self._address(0))

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._end()


def _stop(
    shared: np.ndarray,
    launch: object,
    own: int,
    threads: list[threading.Thread],
    kept: object,
) -> None:
    """Make the threads leave compiled code, and wait for them. `kept` is the memory they use."""
    shared[int(Offsets.STOP) // 8] = 1
    launch(own)  # type: ignore[operator]
    for thread in threads:
        thread.join()
