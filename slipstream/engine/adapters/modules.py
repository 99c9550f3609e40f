"""Checks the matrices of an adapter against the model and packs them for the device.

A module is one of a layer's linear layers, or a part of one, and its matrices have that linear's
sizes. Matrices that do not fit are refused; the error names the module, the layer and the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slipstream.engine.adapters.cache import AdapterSource, ModuleMatrices
from slipstream.kernels.adapter_layout import (
    DOWN_PROJ,
    O_PROJ,
    QKV,
    UP_PROJ,
    LinearShape,
    Matrices,
    PageLayout,
)
from slipstream.model.families.registry import FAMILIES
from slipstream.model.spec import ModelSpec

if TYPE_CHECKING:
    from slipstream.kernels.adapters import HostAdapter


class Module(NamedTuple):
    name: str
    linear: int
    parts: tuple[int, ...]  # the parts of the linear's output that the module covers, in order


# by the module numbers of the protocol
MODULES: dict[int, Module] = {
    0: Module("attn_qkv", QKV, (0, 1, 2)),
    1: Module("attn_q", QKV, (0,)),
    2: Module("attn_k", QKV, (1,)),
    3: Module("attn_v", QKV, (2,)),
    4: Module("attn_dense", O_PROJ, (0,)),
    5: Module("mlp_h_to_4h", UP_PROJ, (0,)),
    6: Module("mlp_4h_to_h", DOWN_PROJ, (0,)),
    7: Module("mlp_gate", UP_PROJ, (1,)),
    18: Module("mlp_gate_up", UP_PROJ, (0, 1)),
}
# modules of the protocol that this engine cannot adapt
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
# The largest float16 value: an adapter may be computed in float16. A comparison with nan is false.
_LARGEST_VALUE = 65504.0
_DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}


class AdapterError(ValueError):
    """The reason why an adapter cannot be used with this model."""


def linear_shapes(spec: ModelSpec) -> tuple[LinearShape, ...]:
    """Return the sizes of a layer's linears. In layers of experts the last two cannot be adapted,
    and have no outputs.
    """
    projections = 2 if spec.gated_mlp else 1
    if spec.experts:
        projections = 0
    # latent attention has no linear layer that makes queries, keys and values
    qkv = (spec.q_size, spec.kv_size, spec.kv_size) if spec.latent is None else ()
    return (
        LinearShape(spec.hidden_size, qkv),
        LinearShape(spec.attended_size, (spec.hidden_size,)),
        LinearShape(spec.hidden_size, (spec.ffn_size,) * projections),
        LinearShape(spec.ffn_size, (spec.hidden_size,) if projections else ()),
    )


class AdapterPacker:
    """Turns adapters into the packed form of one model. Used in the loader's thread."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: PageLayout,
        max_rank: int,
        dtype: str,
        device: str,
        rank_layout: PageLayout | None = None,
        ranks: int = 1,
    ) -> None:
        """layout: of the whole model's linears; rank_layout: of a rank's part of them; dtype: of
        the packed matrices
        """
        self.layout = layout
        self._spec = spec
        self._rank_layout = rank_layout or layout
        self._ranks = ranks
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self._qkv_rows = _qkv_rows(spec)

    def pack(self, modules: Sequence[ModuleMatrices]) -> list[HostAdapter]:
        """Return the parts of all ranks."""
        from slipstream.kernels.adapters import pack_adapter

        packed: dict[tuple[int, int, int], Matrices] = {}
        for module in modules:
            for matrices in self._split(module):
                key = (matrices.layer, matrices.linear, matrices.part)
                if key in packed:
                    raise AdapterError(f"layer {module.layer}: {_name(module.module)} comes twice")
                packed[key] = matrices
        if not packed:
            raise AdapterError("it holds no module")
        parts = []
        for rank in range(self._ranks):
            own = [rank_part(one, self._spec, rank, self._ranks) for one in packed.values()]
            parts.append(pack_adapter(self._rank_layout, own, self.dtype, self.device))
        return parts

    def read_tensors(self, source: AdapterSource) -> list[ModuleMatrices]:
        """Return the matrices in the tensors of a request. The model's sizes say where A ends and B
        begins in a row.
        """
        rows = _weight_rows(source)
        found = []
        for (number, layer, rank), row in zip(source.modules or (), rows, strict=True):
            module = self._module(number)
            shape = self.layout.shapes[module.linear]
            outputs = sum(shape.outputs[part] for part in module.parts)
            used = rank * (shape.inputs + outputs)
            place = f"layer {layer}, {module.name}"
            if not 1 <= rank <= self.max_rank:
                raise AdapterError(
                    f"{place}: rank {rank} is not 1 to {self.max_rank} "
                    "(lora_cache_max_adapter_size)"
                )
            if row.size < used:
                raise AdapterError(
                    f"too few values for {module.name} of layer {layer}: rank {rank} takes {used}, "
                    f"there are {row.size}"
                )
            if row[used:].any():
                raise AdapterError(
                    f"{place}: {used} values were expected at rank {rank}, and more than zeros "
                    "follow"
                )
            first, second = np.split(_float32(row[:used]), [rank * shape.inputs])
            found.append(
                ModuleMatrices(number, layer, first.reshape(rank, -1), second.reshape(-1, rank))
            )
        return found

    def _split(self, given: ModuleMatrices) -> list[Matrices]:
        """Check the matrices of a module and split them into the parts of its linear."""
        module = self._module(given.module)
        self._check(given, module)
        shape = self.layout.shapes[module.linear]
        outputs = [shape.outputs[part] for part in module.parts]
        seconds = np.split(self._in_engine_order(given.second, module), np.cumsum(outputs)[:-1])
        return [
            Matrices(given.layer, module.linear, part, given.first, second.T)
            for part, second in zip(module.parts, seconds, strict=True)
        ]

    def _check(self, given: ModuleMatrices, module: Module) -> None:
        place = f"layer {given.layer}, {module.name}"
        rank = given.first.shape[0]
        if not 0 <= given.layer < self.layout.layers:
            raise AdapterError(f"{place}: the model has layers 0 to {self.layout.layers - 1}")
        if rank > self.max_rank:
            raise AdapterError(
                f"{place}: rank {rank} is over the largest, {self.max_rank} "
                "(lora_cache_max_adapter_size)"
            )
        shape = self.layout.shapes[module.linear]
        first = (rank, shape.inputs)
        second = (sum(shape.outputs[part] for part in module.parts), rank)
        if given.first.shape != first or given.second.shape != second:
            raise AdapterError(
                f"{place}: A {list(given.first.shape)} and B {list(given.second.shape)} do not fit "
                f"the model, which takes {list(first)} and {list(second)}"
            )
        for matrix in (given.first, given.second):
            if not (np.abs(matrix) <= _LARGEST_VALUE).all():
                raise AdapterError(
                    f"{place}: holds values that are not finite, or beyond {_LARGEST_VALUE:g}"
                )

    def _in_engine_order(self, second: np.ndarray, module: Module) -> np.ndarray:
        """Return B's rows in the engine's order, where that differs from the model's own."""
        if module.linear != QKV or self._qkv_rows is None:
            return second
        edges = np.cumsum((0, *self.layout.shapes[QKV].outputs))
        first = module.parts[0]
        last = module.parts[-1]
        rows = self._qkv_rows[edges[first] : edges[last + 1]] - edges[first]
        if rows.min() < 0 or rows.max() >= len(second):
            raise AdapterError(
                "the model has query, key and value in one module, which must be adapted as one"
            )
        ordered: np.ndarray = second[rows]
        return ordered

    def _module(self, number: int) -> Module:
        if number not in MODULES:
            known = ", ".join(f"{number} {module.name}" for number, module in MODULES.items())
            raise AdapterError(f"{_name(number)} cannot be adapted here; these can: {known}")
        module = MODULES[number]
        if max(module.parts) >= len(self.layout.shapes[module.linear].outputs):
            raise AdapterError(
                f"{module.name} cannot be adapted: the model has no such linear layer"
            )
        return module


def rank_part(matrices: Matrices, spec: ModelSpec, rank: int, ranks: int) -> Matrices:
    """Return a rank's part of A and B, as the rank has its part of the linear layer.

    Where a linear layer's outputs are divided, B's are. Where its inputs are divided, A's are, and
    the sum over the ranks that completes the layer's output completes the adapter's, too.
    """
    if ranks == 1:
        return matrices
    if matrices.linear in (O_PROJ, DOWN_PROJ):
        each = matrices.first.shape[1] // ranks
        return matrices._replace(first=matrices.first[:, rank * each : (rank + 1) * each])
    start = rank * matrices.second.shape[1] // ranks
    stop = (rank + 1) * matrices.second.shape[1] // ranks
    if matrices.linear == QKV and matrices.part > 0:
        heads = spec.kv_heads_of(rank, ranks)
        start = heads.start * spec.head_size
        stop = heads.stop * spec.head_size
    return matrices._replace(second=matrices.second[:, start:stop])


def _qkv_rows(spec: ModelSpec) -> np.ndarray | None:
    """Return the row of the model's own fused QKV for each row of the engine's; None: the same."""
    family = next((one for one in FAMILIES if spec.architecture in one.architectures), None)
    order = family.weights.rows.get("attention.qkv") if family is not None else None
    return None if order is None else np.array(order(spec))


def _name(number: int) -> str:
    if number in MODULES:
        return MODULES[number].name
    return f"module {number}" + (f" ({_OTHER_MODULES[number]})" if number in _OTHER_MODULES else "")


def _weight_rows(source: AdapterSource) -> np.ndarray:
    """Return the weights of a request as [modules, longest row], bfloat16 as bit patterns."""
    values = np.frombuffer(source.weights, dtype=_DTYPES[source.datatype])
    modules = len(source.modules or ())
    if not modules or not values.size or values.size % modules:
        raise AdapterError(
            f"lora_weights has {values.size} values, which are no rows of {modules} modules"
        )
    return values.reshape(modules, -1)


def _float32(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:  # bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
