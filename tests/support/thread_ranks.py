"""Ranks as threads of one process, for tests of what each rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.kernels.ranks import ALONE

T = TypeVar("T")


class ThreadRanks:
    """One of several ranks that are threads. Sums are added in the order of the ranks."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(shared)
        self.local_rank = self.rank
        self.local_size = self.size
        self.sums = 0
        self._shared = shared
        self._barrier = barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._barrier.wait()  # everyone has read the values before
        self._shared[self.rank] = value
        self._barrier.wait()
        return list(self._shared)

    def sum(self, y: Tensor) -> Tensor:
        self.sums += 1
        parts = self._exchange(y.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def sum_add_norm(self, hidden: Tensor, delta: Tensor, norm: Any, add_norm: Any) -> Any:
        return add_norm(hidden, self.sum(delta), norm)

    def join(self, part: Tensor, each: int, width: int, out: Tensor | None = None) -> Tensor:
        parts = self._exchange(part.clone())
        assert all(len(found[0]) <= each for found in parts)
        whole = torch.cat(parts, dim=1)
        assert whole.shape[1] == width
        return whole

    def likeliest(self, part: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return self.best_of(*ALONE.likeliest(part, first))

    def best_of(self, best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        values, places = (
            torch.stack(found) for found in zip(*self._exchange((best, tokens)), strict=True)
        )
        largest = values.amax(dim=0)  # [rows]
        wins = (values == largest) | values.isnan()
        return largest, places.masked_fill(~wins, 1 << 62).amin(dim=0)

    def least(self, number: int) -> int:
        return min(self._exchange(number))

    def meet(self, description: str = "") -> None:
        self._exchange(description)


def on_ranks(size: int, run: Callable[[ThreadRanks], T]) -> list[T]:
    """Call `run` for every rank, each in a thread. Return the results by rank."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run_rank(rank: int) -> T:
        try:
            return run(ThreadRanks(rank, shared, barrier))
        except BaseException:
            barrier.abort()  # the others wait for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))
