"""Loads adapters: reads and checks them in a thread, keeps them on the host, and writes them to
pages of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from slipstream.engine.adapters.cache import AdapterCache, AdapterSource, ModuleMatrices
from slipstream.engine.adapters.modules import AdapterError, AdapterPacker, linear_shapes
from slipstream.engine.memory.division import adapter_pages
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.adapters import AdapterPages, HostAdapter, PageLayout
from slipstream.model.spec import ModelSpec

# Reads an adapter's folder; returns its matrices, or tensors in the form of a request's.
ReadFolder = Callable[[str], Sequence[ModuleMatrices] | AdapterSource]


def create_adapters(
    spec: ModelSpec,
    settings: EngineSettings,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    read_folder: ReadFolder | None = None,
) -> AdapterLoader:
    """Create the loader. Memory for pages is allocated when the first adapter is loaded."""
    layout = PageLayout(linear_shapes(spec), spec.layers, settings.adapter_page_rank)
    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * settings.adapter_memory_fraction)
    else:
        # On a CPU, GEMMs with few tokens are faster in float32 than in 16 bits.
        dtype = torch.float32
        room = settings.adapter_host_bytes
    pages = adapter_pages(
        room,
        layout.elements * dtype.itemsize,
        layout.pages_for(settings.adapter_max_rank),
        max_rows,
    )
    cache = AdapterCache(pages, layout.rank, settings.adapter_max_rank, settings.adapter_host_bytes)
    packer = AdapterPacker(spec, layout, settings.adapter_max_rank, dtype, device)
    return AdapterLoader(cache, packer, read_folder or _refuse_folder)


def _refuse_folder(folder: str) -> AdapterSource:
    raise AdapterError("this engine takes adapters with requests only, not from folders")


class AdapterLoader:
    def __init__(self, cache: AdapterCache, packer: AdapterPacker, read_folder: ReadFolder) -> None:
        self.cache = cache
        self.pages: AdapterPages | None = None  # None until the first adapter is loaded
        self._packer = packer
        self._read_folder = read_folder
        self._host: dict[int, HostAdapter] = {}
        self._thread: ThreadPoolExecutor | None = None  # created when first needed
        self._loading: deque[tuple[int, Future[HostAdapter]]] = deque()

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
            del self._host[removed]

    def wait(self, seconds: float) -> None:
        """Wait until the next adapter is loaded, or for this long."""
        if self._loading:
            wait([self._loading[0][1]], timeout=seconds)

    @torch.inference_mode()
    def place(self, placed: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Write adapters to their pages."""
        assert self.pages is not None  # they exist since the first adapter was added
        for adapter, pages in placed:
            self.pages.write(pages, self._host[adapter])

    def check_integrity(self) -> None:
        if sum(adapter.bytes for adapter in self._host.values()) != self.cache.used_bytes:
            raise AssertionError("the bytes of adapters on the host and in the cache disagree")

    def _add(self, adapter: int, loaded: HostAdapter) -> None:
        limit = self.cache.host_bytes
        if loaded.bytes > limit:
            self.cache.add_failure(
                adapter,
                f"it takes {loaded.bytes} bytes, the adapter cache of the host has {limit} "
                "(lora_cache_host_memory_bytes)",
            )
        elif not self._has_pages():
            self.cache.add_failure(
                adapter,
                "the GPU has too little memory left for adapters: lower "
                "kv_cache_free_gpu_mem_fraction or lora_cache_max_adapter_size",
            )
        else:
            self._host[adapter] = loaded
            self.cache.add_loaded(adapter, loaded.rank, loaded.bytes)

    @torch.inference_mode()
    def _has_pages(self) -> bool:
        """Allocate the pages if there are none yet; False when there is too little memory.

        It happens here and not in a step, so that no plan fails because of it.
        """
        if self.pages is None:
            packer = self._packer
            most = packer.layout.pages_for(self.cache.max_rank)
            try:
                self.pages = AdapterPages(
                    packer.layout, self.cache.total_pages, most, packer.dtype, packer.device
                )
            except torch.OutOfMemoryError:
                return False
        return True

    def _load(self, source: AdapterSource) -> HostAdapter:
        """Read and pack an adapter. Runs in the thread."""
        found = self._read_folder(source.folder) if source.folder else source
        if isinstance(found, AdapterSource):
            return self._packer.pack(self._packer.read_tensors(found))
        return self._packer.pack(found)
