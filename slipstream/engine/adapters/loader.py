"""Adapters on their way to the device: read and checked in a thread of their own, kept on the host,
written to pages.

What an adapter may hold follows from the model: a module is a linear layer, or a part of
one, and its matrices have that linear's sizes. What does not fit is refused with the module, the
layer and the sizes in the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from slipstream.engine.adapters.adapters import Adapters, AdapterSource, ModuleMatrices
from slipstream.engine.settings import EngineSettings
from slipstream.kernels.adapters import (
    DOWN_PROJ,
    O_PROJ,
    QKV,
    UP_PROJ,
    AdapterPages,
    HostAdapter,
    LinearShape,
    Matrices,
    PageLayout,
    pack_adapter,
)
from slipstream.model.families.registry import FAMILIES
from slipstream.model.spec import ModelSpec

# Module numbers of the protocol → (name, linear, parts of it that the module's output covers, in
# order).
MODULES: dict[int, tuple[str, int, tuple[int, ...]]] = {
    0: ("attn_qkv", QKV, (0, 1, 2)),
    1: ("attn_q", QKV, (0,)),
    2: ("attn_k", QKV, (1,)),
    3: ("attn_v", QKV, (2,)),
    4: ("attn_dense", O_PROJ, (0,)),
    5: ("mlp_h_to_4h", UP_PROJ, (0,)),
    6: ("mlp_4h_to_h", DOWN_PROJ, (0,)),
    7: ("mlp_gate", UP_PROJ, (1,)),
    18: ("mlp_gate_up", UP_PROJ, (0, 1)),
}


class AdapterError(ValueError):
    """Why an adapter cannot be used with this model."""


# An adapter's folder → its matrices, or the tensors that a request would bring.
ReadFolder = Callable[[str], Sequence[ModuleMatrices] | AdapterSource]
# of a half, which an adapter may be computed in; nan is not below it either
_LARGEST_VALUE = 65504.0
_DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}


def linear_shapes(spec: ModelSpec) -> tuple[LinearShape, ...]:
    """The sizes of a layer's linear layers. Experts have no place for adapters, so their layers
    lack the last two.
    """
    halves = 0 if spec.experts else 2 if spec.gated_mlp else 1
    return (
        LinearShape(spec.hidden_size, (spec.q_size, spec.kv_size, spec.kv_size)),
        LinearShape(spec.q_size, (spec.hidden_size,)),
        LinearShape(spec.hidden_size, (spec.ffn_size,) * halves),
        LinearShape(spec.ffn_size, (spec.hidden_size,) if halves else ()),
    )


def create_adapters(
    spec: ModelSpec,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    read_folder: ReadFolder | None = None,
) -> AdapterLoader:
    """Room for adapters, as much as the settings say. It is taken when the first one comes."""
    layout = PageLayout(linear_shapes(spec), spec.layers, settings.adapter_page_rank)
    most_pages = layout.pages_for(settings.adapter_max_rank)
    if device.type == "cuda":
        room = int(torch.cuda.mem_get_info(device)[0] * settings.adapter_memory_fraction)
    else:
        # on a CPU, GEMMs with a handful of tokens are faster in it than in 16 bits
        dtype = torch.float32
        room = settings.adapter_host_bytes
    useful = settings.max_rows * most_pages
    pages = max(most_pages, min(useful, room // (layout.elements * dtype.itemsize)))
    adapters = Adapters(pages, layout.rank, settings.adapter_max_rank, settings.adapter_host_bytes)
    return AdapterLoader(
        adapters, layout, read_folder or _no_folders, dtype, device, _qkv_rows(spec)
    )


def _qkv_rows(spec: ModelSpec) -> np.ndarray | None:
    """Which row of the model's own query, key and value each row of the engine's is; None: the
    same.
    """
    family = next((one for one in FAMILIES if spec.architecture in one.architectures), None)
    order = family.weights.rows.get("attention.qkv") if family is not None else None
    return None if order is None else np.array(order(spec))


def _no_folders(folder: str) -> AdapterSource:
    raise AdapterError("this engine takes adapters with requests only, not from folders")


class AdapterLoader:
    def __init__(
        self,
        adapters: Adapters,
        layout: PageLayout,
        read_folder: ReadFolder,
        dtype: torch.dtype,
        device: torch.device,
        qkv_rows: np.ndarray | None = None,
    ) -> None:
        """dtype: of the pages, which are made when the first adapter is to be written."""
        self._qkv_rows = qkv_rows
        self.adapters, self.layout, self.dtype, self.device = adapters, layout, dtype, device
        self.pages: AdapterPages | None = None
        self._read_folder = read_folder
        self._host: dict[int, HostAdapter] = {}
        self._thread: ThreadPoolExecutor | None = None  # none before the first adapter comes
        self._coming: deque[tuple[int, Future[HostAdapter]]] = deque()

    def order(self, adapter: int, source: AdapterSource) -> None:
        """Begin to load it, unless it is here or on its way."""
        if self.adapters.order(adapter):
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="adapters")
            self._coming.append((adapter, self._thread.submit(self._load, source)))

    def collect(self) -> None:
        """Take over what has been loaded since, and let go what the host has no room for."""
        while self._coming and self._coming[0][1].done():
            adapter, future = self._coming.popleft()
            error = future.exception()
            if error is None:
                self._take_over(adapter, future.result())
            else:
                self.adapters.failed(adapter, str(error) or type(error).__name__)
        for gone in self.adapters.trim():
            del self._host[gone]

    def wait(self, seconds: float) -> None:
        """Sleep while the next one loads, for as long at most."""
        if self._coming:
            wait([self._coming[0][1]], timeout=seconds)

    @torch.inference_mode()
    def place(self, placed: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Write adapters to the pages they were given."""
        assert self.pages is not None  # nothing is placed before it was taken over
        for adapter, pages in placed:
            self.pages.write(pages, self._host[adapter])

    def check_integrity(self) -> None:
        if sum(adapter.bytes for adapter in self._host.values()) != self.adapters.used_bytes:
            raise AssertionError("adapters on the host and their books disagree")

    def _take_over(self, adapter: int, loaded: HostAdapter) -> None:
        limit = self.adapters.host_bytes
        if loaded.bytes > limit:
            self.adapters.failed(
                adapter,
                f"it takes {loaded.bytes} bytes, the adapter cache of the host has {limit} "
                "(lora_cache_host_memory_bytes)",
            )
        elif not self._has_pages():
            self.adapters.failed(
                adapter,
                "the GPU has too little memory left for adapters: lower "
                "kv_cache_free_gpu_mem_fraction or lora_cache_max_adapter_size",
            )
        else:
            self._host[adapter] = loaded
            self.adapters.loaded(adapter, loaded.rank, loaded.bytes)

    @torch.inference_mode()
    def _has_pages(self) -> bool:
        """Make the pages, unless they are there. Here and not in a step: nobody's plan fails for
        want of them.
        """
        if self.pages is None:
            books = self.adapters
            most = self.layout.pages_for(books.max_rank)
            try:
                self.pages = AdapterPages(
                    self.layout, books.total_pages, most, self.dtype, self.device
                )
            except torch.OutOfMemoryError:
                return False
        return True

    # --- in the thread ---

    def _load(self, source: AdapterSource) -> HostAdapter:
        found = self._read_folder(source.folder) if source.folder else source
        return self._host_adapter(
            self._modules_of(found) if isinstance(found, AdapterSource) else found
        )

    def _modules_of(self, source: AdapterSource) -> list[ModuleMatrices]:
        """The matrices in the tensors of a request: where A ends and B begins in a row, the model's
        sizes tell.
        """
        rows = _values(source)
        found = []
        for (number, layer, rank), row in zip(source.modules or (), rows, strict=True):
            name, linear, parts = self._module(number)
            shape = self.layout.shapes[linear]
            outputs = sum(shape.outputs[part] for part in parts)
            used, place = rank * (shape.inputs + outputs), f"layer {layer}, {name}"
            if not 1 <= rank <= self.adapters.max_rank:
                raise AdapterError(
                    f"{place}: rank {rank} is not 1 to {self.adapters.max_rank} "
                    "(lora_cache_max_adapter_size)"
                )
            if row.size < used:
                raise AdapterError(
                    f"too few values for {name} of layer {layer}: rank {rank} takes {used}, "
                    f"there are {row.size}"
                )
            if row[used:].any():
                raise AdapterError(
                    f"{place}: {used} values were expected at rank {rank}, and more than zeros follow"
                )
            first, second = np.split(_float32(row[:used]), [rank * shape.inputs])
            found.append(
                ModuleMatrices(number, layer, first.reshape(rank, -1), second.reshape(-1, rank))
            )
        return found

    def _host_adapter(self, modules: Sequence[ModuleMatrices]) -> HostAdapter:
        taken: dict[tuple[int, int, int], Matrices] = {}
        for module in modules:
            for matrices in self._matrices(module):
                key = (matrices.layer, matrices.linear, matrices.part)
                if key in taken:
                    raise AdapterError(f"layer {module.layer}: {_name(module.module)} comes twice")
                taken[key] = matrices
        if not taken:
            raise AdapterError("it holds no module")
        return pack_adapter(self.layout, list(taken.values()), self.dtype, self.device)

    def _matrices(self, given: ModuleMatrices) -> list[Matrices]:
        name, linear, parts = self._module(given.module)
        place, rank = f"layer {given.layer}, {name}", given.first.shape[0]
        if not 0 <= given.layer < self.layout.layers:
            raise AdapterError(f"{place}: the model has layers 0 to {self.layout.layers - 1}")
        if rank > self.adapters.max_rank:
            raise AdapterError(
                f"{place}: rank {rank} is over the largest, {self.adapters.max_rank} "
                "(lora_cache_max_adapter_size)"
            )
        shape = self.layout.shapes[linear]
        outputs = [shape.outputs[part] for part in parts]
        expected = [(rank, shape.inputs), (sum(outputs), rank)]
        if [given.first.shape, given.second.shape] != expected:
            raise AdapterError(
                f"{place}: A {list(given.first.shape)} and B {list(given.second.shape)} do not fit the "
                f"model, which takes {list(expected[0])} and {list(expected[1])}"
            )
        if not all(
            (np.abs(matrix) <= _LARGEST_VALUE).all() for matrix in (given.first, given.second)
        ):
            raise AdapterError(
                f"{place}: holds values that are not finite, or beyond {_LARGEST_VALUE:g}"
            )
        seconds = np.split(self._in_order(given.second, linear, parts), np.cumsum(outputs)[:-1])
        return [
            Matrices(given.layer, linear, part, given.first, second.T)
            for part, second in zip(parts, seconds, strict=True)
        ]

    def _in_order(self, second: np.ndarray, linear: int, parts: tuple[int, ...]) -> np.ndarray:
        """B's rows in the order of the engine's, where that is not the model's own."""
        if linear != QKV or self._qkv_rows is None:
            return second
        edges = np.cumsum((0, *self.layout.shapes[QKV].outputs))
        rows = self._qkv_rows[edges[parts[0]] : edges[parts[-1] + 1]] - edges[parts[0]]
        if rows.min() < 0 or rows.max() >= len(second):
            raise AdapterError(
                "the model has query, key and value in one module, which must be adapted as one"
            )
        return second[rows]

    def _module(self, number: int) -> tuple[str, int, tuple[int, ...]]:
        if number not in MODULES:
            known = ", ".join(f"{number} {name}" for number, (name, *_) in MODULES.items())
            raise AdapterError(f"{_name(number)} cannot be adapted here; these can: {known}")
        name, linear, parts = MODULES[number]
        if max(parts) >= len(self.layout.shapes[linear].outputs):
            raise AdapterError(f"{name} cannot be adapted: the model has no such linear layer")
        return name, linear, parts


_OTHER_MODULES = {
    8: "cross_attn_qkv",
    9: "cross_attn_q",
    10: "cross_attn_k",
    11: "cross_attn_v",
    12: "cross_attn_dense",
    13: "moe_h_to_4h",
    14: "moe_4h_to_h",
    15: "moe_gate",
    16: "moe_router",
    17: "mlp_router",
}


def _name(number: int) -> str:
    if number in MODULES:
        return MODULES[number][0]
    return f"module {number}" + (f" ({_OTHER_MODULES[number]})" if number in _OTHER_MODULES else "")


def _values(source: AdapterSource) -> np.ndarray:
    """[modules, longest row], bfloat16 as bit patterns"""
    values, modules = (
        np.frombuffer(source.weights, dtype=_DTYPES[source.datatype]),
        len(source.modules or ()),
    )
    if not modules or not values.size or values.size % modules:
        raise AdapterError(
            f"lora_weights has {values.size} values, which are no rows of {modules} modules"
        )
    return values.reshape(modules, -1)


def _float32(values: np.ndarray) -> np.ndarray:
    return (
        (values.astype(np.uint32) << 16).view(np.float32)
        if values.dtype == np.uint16
        else values.astype(np.float32)
    )
