"""A following rank: it carries out the leader's orders and samples the same tokens for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.engine.adapters.store import AdapterStore
from slipstream.engine.plan import StepPlan
from slipstream.engine.ranks.digests import ChangedRows
from slipstream.engine.ranks.orders import (
    AdapterGone,
    AdapterHere,
    DigestRequest,
    Leave,
    Order,
    RowDigests,
)

if TYPE_CHECKING:
    from slipstream.engine.loop import StepRunner
    from slipstream.kernels.adapters import HostAdapter


@dataclass(frozen=True, slots=True)
class Follower:
    """The parts of a following rank."""

    runner: StepRunner
    adapters: AdapterStore


def follow(
    follower: Follower, orders: Iterator[Order], answer: Callable[[RowDigests], None]
) -> None:
    """Carry out orders until `Leave`. The results of plans are not read."""
    changed = ChangedRows(follower.runner.rows)
    for order in orders:
        if isinstance(order, StepPlan):
            changed.note(order)
            if order.placed:
                follower.adapters.place(order.placed)
                follower.runner.adapters = follower.adapters.pages
            follower.runner.launch(order)
        elif isinstance(order, AdapterHere):
            if follower.adapters.has_pages():
                follower.adapters.add(order.adapter, _unpack(order, follower.adapters.device))
        elif isinstance(order, AdapterGone):
            follower.adapters.remove(order.adapter)
        elif isinstance(order, DigestRequest):
            answer(RowDigests(changed.take_digests()))
        elif isinstance(order, Leave):
            return


def pack_order(number: int, adapter: HostAdapter) -> AdapterHere:
    """Return the order that carries a follower's part of an adapter."""
    import torch

    values = adapter.values.contiguous().view(torch.uint8).numpy().tobytes()
    runs = [table.numpy().tobytes() for table in adapter.runs]
    dtype = str(adapter.values.dtype).removeprefix("torch.")
    return AdapterHere(number, adapter.rank, dtype, values, runs, adapter.linears)


def _unpack(order: AdapterHere, device: str) -> HostAdapter:
    """Return the adapter that an order carries, in pinned memory for a GPU."""
    import torch

    from slipstream.kernels.adapters import HostAdapter

    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    values = torch.frombuffer(bytearray(order.values), dtype=dtypes[order.dtype])
    runs = [
        torch.frombuffer(bytearray(table), dtype=torch.int32).view(-1, 3) for table in order.runs
    ]
    if device.startswith("cuda"):
        values = values.pin_memory()
        runs = [table.pin_memory() for table in runs]
    return HostAdapter(order.rank, values, runs, order.linears)
