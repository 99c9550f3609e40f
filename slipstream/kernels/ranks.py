"""Tensor parallelism: what the ranks of one engine exchange while they compute.

A rank is a process with a part of every weight. All ranks compute the same tokens. Sums over the
ranks complete the output of a linear layer whose inputs are divided, and the logits of the ranks'
parts of the vocabulary are joined. Invariant: every rank gets the same bits, so that every rank
samples the same tokens from them.

One rank needs no torch; `torch_ranks.py` is for several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.inputs import Input
    from slipstream.kernels.normalisation import Norm

# (residual stream, what is added to it, norm) → the normalised sum: `Operations.add_norm`
AddNorm: TypeAlias = "Callable[[Tensor, Tensor | None, Norm], Input]"


class Ranks(Protocol):
    """One rank's end of the communication. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def local_rank(self) -> int:
        """The place of this rank among those on the same machine."""
        ...

    @property
    def local_size(self) -> int:
        """The number of ranks on the same machine."""
        ...

    def sum(self, y: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, added in the same order on every rank. `y` may be
        overwritten.
        """
        ...

    def sum_add_norm(self, hidden: Tensor, delta: Tensor, norm: Norm, add_norm: AddNorm) -> Input:
        """Add the sum of the ranks' `delta` [tokens, size] to `hidden` in place, and return the
        normalised result. add_norm: the device's operation for one rank
        """
        ...

    def join(self, part: Tensor, each: int, width: int, out: Tensor | None = None) -> Tensor:
        """Return the ranks' parts side by side: [rows, width].

        part: [rows, columns]. Rank r has the columns from r * each on, at most `each` of them, and
        none beyond `width`. out: memory for the result
        """
        ...

    def likeliest(self, part: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row over all parts and its token, the lowest of equals;
        nan if the row has a nan. part: [rows, columns] logits of the tokens from `first` on
        """
        ...

    def best_of(self, best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of the ranks' logits for each row and its token, the lowest of equals;
        nan if a rank has a nan. best: [rows] of this rank's part; tokens: int64 [rows]
        """
        ...

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers. It waits for all ranks."""
        ...

    def meet(self, description: str = "") -> None:
        """Wait for all ranks. Raises RanksDiffer if they give different descriptions."""
        ...


@dataclass(frozen=True)
class OneRank:
    """The only rank of an engine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def sum(self, y: Tensor) -> Tensor:
        return y

    def sum_add_norm(self, hidden: Tensor, delta: Tensor, norm: Norm, add_norm: AddNorm) -> Input:
        return add_norm(hidden, delta, norm)

    def join(self, part: Tensor, each: int, width: int, out: Tensor | None = None) -> Tensor:
        return part

    def likeliest(self, part: Tensor, first: int) -> tuple[Tensor, Tensor]:
        best, tokens = part.max(dim=-1)
        return best, tokens + first

    def best_of(self, best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return best, tokens

    def least(self, number: int) -> int:
        return number

    def meet(self, description: str = "") -> None:
        return None


ALONE = OneRank()
