"""Which adapters there are, where they lie, and who uses them. No torch here.

    ordered ──load──▶ on the host ──take──▶ in pages of the device ──▶ used by rows
                          ▲                     │
                          └──── pages taken ────┘      both by least recent use, never what somebody needs

An adapter that is in pages is on the host, too. A request that lives holds its adapter on the host;
a row that runs, or a launched plan that has not come back, keeps its pages. What the host keeps
besides is bounded by its share of bytes. Page 0 is nobody's: a row without an adapter has no pages.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy

_REMEMBERED_FAILURES = 1000


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an adapter's matrices come from: a folder to read, or the tensors that a request
    brought.
    """

    folder: str = ""  # with adapter_config.json (PEFT) or model.lora_weights.npy
    weights: bytes = b""  # [modules, longest row]: A [rank, in], then B [out, rank], then zeros
    datatype: Literal["float16", "bfloat16", "float32"] = "float16"
    # module number, layer, rank of each row of weights
    modules: list[tuple[int, int, int]] | None = None


class ModuleMatrices(NamedTuple):
    """What an adapter holds for one module."""

    module: int  # its number in the protocol
    layer: int
    first: numpy.ndarray[Any, Any]  # A: float32 [rank, in]
    second: numpy.ndarray[Any, Any]  # B: float32 [out, rank], scaled


@dataclass(slots=True)
class _Adapter:
    holders: int = 0  # live requests, those that wait included
    bytes: int = 0  # on the host; 0 while it is loading
    page_count: int = 0
    pages: tuple[int, ...] = ()
    rows: int = 0  # running rows that use its pages
    last_step: int = 0  # the newest plan that may use its pages

    @property
    def loaded(self) -> bool:
        return self.bytes > 0


class Adapters:
    def __init__(self, total_pages: int, page_rank: int, max_rank: int, host_bytes: int) -> None:
        self.total_pages, self.page_rank, self.max_rank, self.host_bytes = (
            total_pages,
            page_rank,
            max_rank,
            host_bytes,
        )
        self.used_bytes = 0
        self.loads = 0
        # adapters given pages since the last plan
        self.placed: list[tuple[int, tuple[int, ...]]] = []
        self._adapters: OrderedDict[int, _Adapter] = OrderedDict()  # least recently used first
        self._failures: OrderedDict[int, str] = OrderedDict()
        # a heap: low numbers first, so that pages in use lie close
        self._free_pages = list(range(1, total_pages + 1))
        self._planned = 0  # the step that is being planned, or was last
        # steps that were launched and have not come back, in order
        self._flight: deque[int] = deque()

    # --- loading ---

    def order(self, adapter: int) -> bool:
        """It is wanted. True when it has to be loaded: it is neither here nor on its way."""
        failed_before = self._failures.pop(adapter, None) is not None
        known = adapter in self._adapters
        self._adapters.setdefault(adapter, _Adapter())
        self._adapters.move_to_end(adapter)
        return failed_before or not known

    def loaded(self, adapter: int, rank: int, size: int) -> None:
        """It is on the host."""
        state = self._adapters[adapter]
        state.bytes, state.page_count = size, -(-rank // self.page_rank)
        self.used_bytes += size
        self.loads += 1

    def trim(self) -> list[int]:
        """Forget the least recently used until the rest fits the host's share; returns who has
        gone.

        Those that live requests hold stay: where they alone are more than the share, they are so
        until they finish.
        """
        gone: list[int] = []
        excess = self.used_bytes - self.host_bytes
        for adapter, state in self._adapters.items() if excess > 0 else ():
            if state.loaded and not state.holders and self._settled(state):
                gone.append(adapter)
                excess -= state.bytes
                if excess <= 0:
                    break
        for adapter in gone:
            self._forget(adapter)
        return gone

    def failed(self, adapter: int, reason: str) -> None:
        """It could not be loaded; requests that wait for it will ask why."""
        self._failures[adapter] = reason
        while len(self._failures) > _REMEMBERED_FAILURES:
            self._failures.popitem(last=False)
        if not self._adapters[adapter].holders:
            del self._adapters[adapter]

    # --- requests ---

    def problem(self, adapter: int, name: str) -> str:
        """Why a request for this adapter can never run; empty when it can."""
        if adapter in self._failures:
            return f"{name}: {self._failures[adapter]}"
        if adapter not in self._adapters:
            return f"{name} not found in cache. Please send LoRA weights with request"
        return ""

    def hold(self, adapter: int) -> None:
        self._adapters[adapter].holders += 1
        self._adapters.move_to_end(adapter)

    def drop(self, adapter: int) -> None:
        state = self._adapters[adapter]
        state.holders -= 1
        if not state.holders and adapter in self._failures:
            del self._adapters[adapter]

    # --- pages ---

    def is_loaded(self, adapter: int) -> bool:
        return self._adapters[adapter].loaded

    def reserve(self, adapter: int) -> bool:
        """Give it pages, unless it has some; False while those in use leave too few."""
        state = self._adapters[adapter]
        if state.pages:
            return True
        idle = [
            other
            for other in self._adapters.values()
            if other.pages and not other.rows and self._settled(other)
        ]
        if len(self._free_pages) + sum(len(other.pages) for other in idle) < state.page_count:
            return False
        for other in idle:
            if len(self._free_pages) >= state.page_count:
                break
            self._empty(other)
        state.pages = tuple(heapq.heappop(self._free_pages) for _ in range(state.page_count))
        self.placed.append((adapter, state.pages))
        return True

    def use(self, adapter: int) -> None:
        """One more row runs with it."""
        self._adapters[adapter].rows += 1

    def release(self, adapter: int) -> None:
        """One row less; plans that are on their way may still compute with its pages."""
        state = self._adapters[adapter]
        state.rows -= 1
        state.last_step = self._planned

    def pages_of(self, adapter: int) -> tuple[int, ...]:
        return self._adapters[adapter].pages

    def take_placed(self) -> list[tuple[int, tuple[int, ...]]]:
        """What has to be written to pages before the next plan computes. An adapter that lost its
        pages again before that is left out.
        """
        placed, self.placed = self.placed, []
        return [
            (adapter, pages)
            for adapter, pages in placed
            if adapter in self._adapters and self._adapters[adapter].pages == pages
        ]

    def begin(self, step: int) -> None:
        self._planned = step

    def launched(self, step: int) -> None:
        self._flight.append(step)

    def returned(self, step: int) -> None:
        """A launched step has come back, or was never carried out."""
        self._flight.remove(step)

    # --- books ---

    @property
    def free_pages(self) -> int:
        """Pages that could be handed out now."""
        idle = sum(
            len(state.pages)
            for state in self._adapters.values()
            if not state.rows and self._settled(state)
        )
        return len(self._free_pages) + idle

    @property
    def on_host(self) -> int:
        return sum(state.loaded for state in self._adapters.values())

    def _settled(self, state: _Adapter) -> bool:
        """No plan that computes with its pages is on its way."""
        return not self._flight or self._flight[0] > state.last_step

    def _forget(self, adapter: int) -> None:
        state = self._adapters.pop(adapter)
        self._empty(state)
        self.used_bytes -= state.bytes

    def _empty(self, state: _Adapter) -> None:
        for page in state.pages:
            heapq.heappush(self._free_pages, page)
        state.pages = ()

    def check_integrity(self, held: Iterable[int], running: Iterable[int]) -> None:
        """Raise if pages or bytes are lost, or counts differ from the adapters of live requests and
        running rows.
        """
        used = [page for state in self._adapters.values() for page in state.pages]
        if sorted(used + self._free_pages) != list(range(1, self.total_pages + 1)):
            raise AssertionError(
                f"adapter pages lost or doubled: used {used}, free {self._free_pages}"
            )
        if self.used_bytes != sum(state.bytes for state in self._adapters.values()):
            raise AssertionError("bytes of adapters on the host do not add up")
        holders = Counter(adapter for adapter in held if adapter)
        rows = Counter(adapter for adapter in running if adapter)
        for adapter, state in self._adapters.items():
            if (state.holders, state.rows) != (holders[adapter], rows[adapter]):
                raise AssertionError(
                    f"adapter {adapter}: counts {state.holders} requests and {state.rows} rows, "
                    f"there are {holders[adapter]} and {rows[adapter]}"
                )
            if state.pages and not state.loaded:
                raise AssertionError(f"adapter {adapter} has pages but nothing to put into them")
