"""The log of orders: what the leading rank sends to each follower, in one order. No torch here.

The state of a rank follows from its weights and the orders alone. So every rank holds the same rows
and blocks, and computes its part of the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from slipstream.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class AdapterHere:
    """A follower's part of an adapter, sent before the first plan that places it."""

    adapter: int
    rank: int  # the highest rank among its matrices
    dtype: str  # type of the values, such as "float32"
    values: bytes
    runs: list[bytes]  # per page: int32 [runs, 3], as `HostAdapter.runs`
    linears: list[int]  # per page


@dataclass(frozen=True, slots=True)
class AdapterGone:
    """The adapter is removed from host memory."""

    adapter: int


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Answer with the digests of the rows that changed since the last request."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End: no further order follows."""


@dataclass(frozen=True, slots=True)
class RowDigests:
    """A follower's answer to `DigestRequest`: row → digest of its tokens and its block table."""

    rows: dict[int, int] = field(default_factory=dict)


Order = StepPlan | AdapterHere | AdapterGone | DigestRequest | Leave


class Followers(Protocol):
    """The leader's end of the channels to the followers."""

    def send(self, order: Order, follower: int | None = None) -> None:
        """Send an order to all followers, or to one of them: 0 is rank 1."""
        ...

    def receive_digests(self) -> list[RowDigests]:
        """Return the followers' answers to a `DigestRequest`, by follower."""
        ...

    def close(self) -> None:
        """Close the channels once everything is sent."""
        ...
