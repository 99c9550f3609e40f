"""Several ranks over torch.distributed: see `kernels/ranks.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.inputs import Input
from slipstream.kernels.normalisation import Norm
from slipstream.kernels.rank_errors import RankLost, RanksDiffer
from slipstream.kernels.ranks import ALONE, AddNorm

_DESCRIPTION_BYTES = 1024  # of the software and the device of a rank, in UTF-8


class TorchRanks:
    """Ranks over torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(
        self,
        group: Any = None,
        find_failure: Callable[[], str] = lambda: "",
        batch_invariant: bool = False,
        local_place: tuple[int, int] | None = None,
    ) -> None:
        """group: a process group; None: the default one. Its backend must take tensors of a CPU,
        too: numbers of the host are exchanged over it. find_failure: returns why another rank has
        ended, if that is known. batch_invariant: add in the order of the ranks, whatever the size
        of a tensor; the library adds the parts of a tensor in different orders. local_place: rank
        and number of ranks on this machine; None: all ranks are on it
        """
        self._group = group
        # two numbers have one sum
        self._in_order = batch_invariant and dist.get_world_size(group) > 2
        self._find_failure = find_failure
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.local_rank, self.local_size = local_place or (self.rank, self.size)

    def sum(self, y: Tensor) -> Tensor:
        if self._in_order:
            total, *others = self._gather(y)
            for part in others:
                total += part
            return total
        y = y.contiguous()
        with self._reported():
            dist.all_reduce(y, group=self._group)
        return y

    def sum_add_norm(self, hidden: Tensor, delta: Tensor, norm: Norm, add_norm: AddNorm) -> Input:
        return add_norm(hidden, self.sum(delta), norm)

    def join(self, part: Tensor, each: int, width: int, out: Tensor | None = None) -> Tensor:
        rows, columns = part.shape
        if out is None:
            out = part.new_empty((rows, width))
        if not rows:
            return out
        parts = self._gather(functional.pad(part, (0, each - columns)))
        for rank, found in enumerate(parts):
            first = min(rank * each, width)
            last = min(first + each, width)
            out[:, first:last] = found[:, : last - first]
        return out

    def likeliest(self, part: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return self.best_of(*ALONE.likeliest(part, first))

    def best_of(self, best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # a double holds every token exactly
        pairs = self._gather(torch.stack((best.double(), tokens.double()), dim=-1))
        values, places = torch.stack(pairs).unbind(dim=-1)  # [ranks, rows] each
        largest = values.amax(dim=0)
        wins = (values == largest) | values.isnan()
        lowest = places.masked_fill(~wins, torch.inf).amin(dim=0)
        return largest.to(best.dtype), lowest.to(torch.int64)

    def least(self, number: int) -> int:
        found = torch.tensor([number], dtype=torch.int64)
        with self._reported():
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return int(found)

    def meet(self, description: str = "") -> None:
        own = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
        text = description.encode()[:_DESCRIPTION_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        found = [bytes(part.tolist()).rstrip(b"\0") for part in self._gather(own)]
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RanksDiffer(
                    f"the ranks of this engine differ: rank 0 has {found[0].decode()}, rank {rank} "
                    f"has {other.decode()}; run all ranks on the same software and the same kind "
                    "of device"
                )

    def _gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self._reported():
            dist.all_gather(parts, part, group=self._group)
        return parts

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise RankLost where the library finds that it cannot reach another rank."""
        try:
            yield
        except RuntimeError as error:
            reason = self._find_failure() or str(error).strip().partition("\n")[0]
            raise RankLost(reason) from error
