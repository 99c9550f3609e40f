"""Loads adapters: reads and checks them in a thread, keeps them on the host, and writes them to
pages of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.engine.adapters.cache import AdapterCache, AdapterSource, ModuleMatrices
from slipstream.engine.adapters.modules import AdapterError, AdapterPacker, linear_shapes
from slipstream.engine.adapters.store import AdapterStore
from slipstream.engine.memory.division import adapter_pages
from slipstream.engine.ranks.following import pack_order
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.adapter_layout import PageLayout
from slipstream.kernels.ranks import ALONE, Ranks
from slipstream.model.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.engine.ranks.leading import LeadingRunner
    from slipstream.kernels.adapters import AdapterPages, HostAdapter

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Reads an adapter's folder; returns its matrices, or tensors in the form of a request's.
ReadFolder = Callable[[str], Sequence[ModuleMatrices] | AdapterSource]


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of a rank's memory for adapters, which are the same on all ranks."""

    layout: PageLayout  # of the rank's part of a page
    pages: int
    dtype: str  # as torch names it


def create_store(
    spec: ModelSpec,
    settings: EngineSettings,
    max_rows: int,
    dtype: str,
    device: str,
    ranks: Ranks = ALONE,
) -> tuple[AdapterStore, AdapterSizes]:
    """Create the memory of a rank for adapters. Pages are allocated when the first one is loaded.

    spec: the rank's part of the model
    """
    layout = PageLayout(linear_shapes(spec), spec.layers, settings.adapter_page_rank)
    if device.startswith("cuda"):
        import torch

        room = int(torch.cuda.mem_get_info(device)[0] * settings.adapter_memory_fraction)
    else:
        # On a CPU, GEMMs with few tokens are faster in float32 than in 16 bits.
        dtype = "float32"
        room = settings.adapter_host_bytes
    most = layout.pages_for(settings.adapter_max_rank)
    pages = adapter_pages(room, layout.elements * ITEM_BYTES[dtype], most, max_rows)
    sizes = AdapterSizes(layout, ranks.least(pages), dtype)
    return AdapterStore(layout, sizes.pages, most, dtype, device, ranks), sizes


def create_adapters(
    spec: ModelSpec,
    settings: EngineSettings,
    store: AdapterStore,
    sizes: AdapterSizes,
    read_folder: ReadFolder | None = None,
    leader: LeadingRunner | None = None,
    ranks: int = 1,
) -> AdapterLoader:
    """Create the loader. spec: the whole model; leader: sends the followers their parts"""
    whole = PageLayout(linear_shapes(spec), spec.layers, settings.adapter_page_rank)
    cache = AdapterCache(
        sizes.pages, whole.rank, settings.adapter_max_rank, settings.adapter_host_bytes
    )
    packer = AdapterPacker(
        spec, whole, settings.adapter_max_rank, sizes.dtype, store.device, sizes.layout, ranks
    )
    return AdapterLoader(cache, packer, read_folder or _refuse_folder, store, leader)


def _refuse_folder(folder: str) -> AdapterSource:
    raise AdapterError("this engine takes adapters with requests only, not from folders")


class AdapterLoader:
    def __init__(
        self,
        cache: AdapterCache,
        packer: AdapterPacker,
        read_folder: ReadFolder,
        store: AdapterStore,
        leader: LeadingRunner | None = None,
    ) -> None:
        """leader: the runner that reaches the other ranks; None: there are none"""
        self.cache = cache
        self._packer = packer
        self._read_folder = read_folder
        self._store = store
        self._leader = leader
        self._bytes: dict[int, int] = {}  # host memory of each adapter, on all ranks together
        self._thread: ThreadPoolExecutor | None = None  # created when first needed
        self._loading: deque[tuple[int, Future[list[HostAdapter]]]] = deque()

    @property
    def pages(self) -> AdapterPages | None:
        """The pages of the device; None until the first adapter is loaded."""
        return self._store.pages

    def request_load(self, adapter: int, source: AdapterSource) -> None:
        """Start to load an adapter, unless it is loaded or loading."""
        if self.cache.request_load(adapter):
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="adapters")
            self._loading.append((adapter, self._thread.submit(self._load, source)))

    def collect(self) -> None:
        """Add adapters that are loaded to the cache, and remove those that exceed its bytes."""
        while self._loading and self._loading[0][1].done():
            adapter, future = self._loading.popleft()
            error = future.exception()
            if error is None:
                self._add(adapter, future.result())
            else:
                self.cache.add_failure(adapter, str(error) or type(error).__name__)
        for removed in self.cache.trim():
            del self._bytes[removed]
            self._store.remove(removed)
            if self._leader is not None:
                self._leader.remove_adapter(removed)

    def wait(self, seconds: float) -> None:
        """Wait until the next adapter is loaded, or for this long."""
        if self._loading:
            wait([self._loading[0][1]], timeout=seconds)

    def place(self, placed: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Write adapters to their pages."""
        self._store.place(placed)

    def check_integrity(self) -> None:
        if sum(self._bytes.values()) != self.cache.used_bytes:
            raise AssertionError("the bytes of adapters on the host and in the cache disagree")
        if self._store.numbers != set(self._bytes):
            raise AssertionError("the adapters on the host and those that are counted differ")

    def _add(self, adapter: int, parts: list[HostAdapter]) -> None:
        """parts: those of all ranks"""
        limit = self.cache.host_bytes
        size = sum(part.bytes for part in parts)
        if size > limit:
            self.cache.add_failure(
                adapter,
                f"it takes {size} bytes, the adapter cache of the host has {limit} "
                "(lora_cache_host_memory_bytes)",
            )
            return
        if self._leader is not None:
            # the followers make their pages, if there are none, while this rank makes its own
            self._leader.add_adapter([pack_order(adapter, part) for part in parts[1:]])
        if not self._store.has_pages():
            self.cache.add_failure(
                adapter,
                "the GPU has too little memory left for adapters: lower "
                "kv_cache_free_gpu_mem_fraction or lora_cache_max_adapter_size",
            )
            return
        self._store.add(adapter, parts[0])
        self._bytes[adapter] = size
        self.cache.add_loaded(adapter, parts[0].rank, size)

    def _load(self, source: AdapterSource) -> list[HostAdapter]:
        """Read an adapter and pack the parts of all ranks. Runs in the thread."""
        found = self._read_folder(source.folder) if source.folder else source
        if isinstance(found, AdapterSource):
            return self._packer.pack(self._packer.read_tensors(found))
        return self._packer.pack(found)
