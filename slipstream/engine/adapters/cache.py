"""The cache of adapters: which are loaded, which have pages on the device, and which are in use. No
torch here.

    requested ──load──▶ on the host ──reserve──▶ in pages of the device ──▶ used by rows
                            ▲                          │
                            └────── pages reused ──────┘

Both the host's memory and the pages are reused by least recent use, but never while in use. An
adapter in pages is on the host, too. A live request holds its adapter on the host. A running row,
or a launched plan whose result has not arrived, holds the adapter's pages. The remaining adapters
on the host are bounded by bytes. Page 0 is reserved: a row without an adapter has no pages.
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
    """The source of an adapter's matrices: a folder, or tensors in a request."""

    folder: str = ""  # with adapter_config.json (PEFT) or model.lora_weights.npy
    weights: bytes = b""  # [modules, longest row]: A [rank, in], then B [out, rank], then zeros
    datatype: Literal["float16", "bfloat16", "float32"] = "float16"
    # module number, layer and rank of each row of weights
    modules: list[tuple[int, int, int]] | None = None


class ModuleMatrices(NamedTuple):
    """The matrices of an adapter for one module."""

    module: int  # its number in the protocol
    layer: int
    first: numpy.ndarray[Any, Any]  # A: float32 [rank, in]
    second: numpy.ndarray[Any, Any]  # B: float32 [out, rank], scaled


@dataclass(slots=True)
class _Adapter:
    holders: int = 0  # live requests, waiting ones included
    bytes: int = 0  # on the host; 0 while it is loading
    page_count: int = 0
    pages: tuple[int, ...] = ()
    rows: int = 0  # running rows that use its pages
    last_step: int = 0  # the newest plan that may use its pages

    @property
    def loaded(self) -> bool:
        return self.bytes > 0


class AdapterCache:
    def __init__(self, total_pages: int, page_rank: int, max_rank: int, host_bytes: int) -> None:
        self.total_pages = total_pages
        self.page_rank = page_rank
        self.max_rank = max_rank
        self.host_bytes = host_bytes
        self.used_bytes = 0
        self.loads = 0
        # adapters that got pages since the last plan
        self.placed: list[tuple[int, tuple[int, ...]]] = []
        self._adapters: OrderedDict[int, _Adapter] = OrderedDict()  # least recently used first
        self._failures: OrderedDict[int, str] = OrderedDict()
        # a heap: low numbers first, so that pages in use lie close together
        self._free_pages = list(range(1, total_pages + 1))
        self._planned = 0  # the step that is being planned, or was planned last
        # launched steps whose results have not arrived, in order
        self._in_flight: deque[int] = deque()

    # --- loading ---

    def request_load(self, adapter: int) -> bool:
        """Mark an adapter as used. Returns True when the caller must load it: it is neither loaded
        nor loading.
        """
        failed_before = self._failures.pop(adapter, None) is not None
        known = adapter in self._adapters
        self._adapters.setdefault(adapter, _Adapter())
        self._adapters.move_to_end(adapter)
        return failed_before or not known

    def add_loaded(self, adapter: int, rank: int, size: int) -> None:
        """Record that an adapter is on the host."""
        state = self._adapters[adapter]
        state.bytes = size
        state.page_count = -(-rank // self.page_rank)
        self.used_bytes += size
        self.loads += 1

    def trim(self) -> list[int]:
        """Remove the least recently used adapters until the rest fits `host_bytes`; return the
        removed ones.

        Adapters of live requests stay, even if they alone take more.
        """
        removed: list[int] = []
        excess = self.used_bytes - self.host_bytes
        for adapter, state in self._adapters.items() if excess > 0 else ():
            if state.loaded and not state.holders and self._is_idle(state):
                removed.append(adapter)
                excess -= state.bytes
                if excess <= 0:
                    break
        for adapter in removed:
            self._remove(adapter)
        return removed

    def add_failure(self, adapter: int, reason: str) -> None:
        """Record why an adapter could not be loaded. Requests that wait for it fail with this."""
        self._failures[adapter] = reason
        while len(self._failures) > _REMEMBERED_FAILURES:
            self._failures.popitem(last=False)
        if not self._adapters[adapter].holders:
            del self._adapters[adapter]

    # --- requests ---

    def problem(self, adapter: int, name: str) -> str:
        """Return why a request with this adapter can never run; empty when it can."""
        if adapter in self._failures:
            return f"{name}: {self._failures[adapter]}"
        if adapter not in self._adapters:
            return f"{name} not found in cache. Please send LoRA weights with request"
        return ""

    def hold(self, adapter: int) -> None:
        """Keep an adapter on the host for a live request."""
        self._adapters[adapter].holders += 1
        self._adapters.move_to_end(adapter)

    def drop(self, adapter: int) -> None:
        """Undo `hold` when the request is over."""
        state = self._adapters[adapter]
        state.holders -= 1
        if not state.holders and adapter in self._failures:
            del self._adapters[adapter]

    # --- pages ---

    def is_loaded(self, adapter: int) -> bool:
        return self._adapters[adapter].loaded

    def reserve(self, adapter: int) -> bool:
        """Reserve pages for an adapter, unless it has some; False while too few are idle."""
        state = self._adapters[adapter]
        if state.pages:
            return True
        idle = [other for other in self._adapters.values() if other.pages and self._is_idle(other)]
        if len(self._free_pages) + sum(len(other.pages) for other in idle) < state.page_count:
            return False
        for other in idle:
            if len(self._free_pages) >= state.page_count:
                break
            self._release_pages(other)
        state.pages = tuple(heapq.heappop(self._free_pages) for _ in range(state.page_count))
        self.placed.append((adapter, state.pages))
        return True

    def use(self, adapter: int) -> None:
        """Count one more row that runs with the adapter."""
        self._adapters[adapter].rows += 1

    def release(self, adapter: int) -> None:
        """Count one row less. Plans in flight may still use the adapter's pages."""
        state = self._adapters[adapter]
        state.rows -= 1
        state.last_step = self._planned

    def get_pages(self, adapter: int) -> tuple[int, ...]:
        return self._adapters[adapter].pages

    def take_placed(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the adapters to be written to pages before the next plan computes, without those
        that have lost their pages again.
        """
        placed = self.placed
        self.placed = []
        return [
            (adapter, pages)
            for adapter, pages in placed
            if adapter in self._adapters and self._adapters[adapter].pages == pages
        ]

    # --- steps ---

    def begin_step(self, step: int) -> None:
        self._planned = step

    def step_launched(self, step: int) -> None:
        self._in_flight.append(step)

    def step_returned(self, step: int) -> None:
        """Record that a launched step has finished, or was never carried out."""
        self._in_flight.remove(step)

    # --- statistics and invariants ---

    @property
    def free_pages(self) -> int:
        """The number of pages that could be reserved now."""
        idle = sum(len(state.pages) for state in self._adapters.values() if self._is_idle(state))
        return len(self._free_pages) + idle

    @property
    def on_host(self) -> int:
        return sum(state.loaded for state in self._adapters.values())

    def _is_idle(self, state: _Adapter) -> bool:
        """Return whether no running row and no plan in flight uses the adapter's pages."""
        finished = not self._in_flight or self._in_flight[0] > state.last_step
        return not state.rows and finished

    def _remove(self, adapter: int) -> None:
        state = self._adapters.pop(adapter)
        self._release_pages(state)
        self.used_bytes -= state.bytes

    def _release_pages(self, state: _Adapter) -> None:
        for page in state.pages:
            heapq.heappush(self._free_pages, page)
        state.pages = ()

    def check_integrity(self, held: Iterable[int], running: Iterable[int]) -> None:
        """Raise if pages or bytes are lost, or counts differ from the adapters of live requests
        (`held`) and of running rows (`running`).
        """
        used: list[int] = []
        for state in self._adapters.values():
            used += state.pages
        if sorted(used + self._free_pages) != list(range(1, self.total_pages + 1)):
            raise AssertionError(
                f"adapter pages lost or in two places: used {used}, free {self._free_pages}"
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
                raise AssertionError(f"adapter {adapter} has pages but is not loaded")
