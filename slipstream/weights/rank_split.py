"""Split a checkpoint into ranks and join it again.

    rank = pipeline stage * tp_size + tensor-parallel rank

Layer numbers start at 0 in every pipeline stage. Queries, keys and values are split by heads. If
there are fewer KV heads than ranks, each rank holds a copy of one KV head. The first linear of a
feed-forward block is split by rows and the second by columns, within each expert. The output head
is padded and split by rows. Every rank holds all other parameters completely.

`engine_part` is the same for the tensors of an engine, which is one file for any number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import Shape, checkpoint_shapes
from slipstream.weights.sources.mapped_tensors import MappedTensors

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_HEAD = "lm_head."
# rows of these belong to heads, in order
_BY_HEAD = (".attention.sinks.weight", ".attention.q_b.weight", ".attention.kv_b.weight")
_LAST = ("transformer.ln_f.", "transformer.project_out.")


@dataclass(frozen=True)
class RankMapping:
    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def check(self, spec: ModelSpec) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise ValueError("tp_size and pp_size must be at least 1")
        smaller, larger = sorted((spec.kv_heads, self.tp_size))
        ffn_size = math.gcd(*spec.ffn_sizes)
        if spec.heads % self.tp_size or larger % smaller or ffn_size % self.tp_size:
            raise ValueError(
                f"tp_size {self.tp_size} does not divide this model: it has {spec.heads} heads, "
                f"{spec.kv_heads} KV heads and {ffn_size} feed-forward columns"
            )
        if spec.layers % self.pp_size:
            raise ValueError(
                f"pp_size {self.pp_size} does not divide this model's {spec.layers} layers"
            )


@dataclass(frozen=True)
class Part:
    """The part of a parameter that a rank has: ranges of rows, columns, zero rows at the end."""

    rows: tuple[Range, ...]
    columns: Range | None = None
    padding: int = 0
    # zeros in place of the values: a bias that only the first rank adds
    zeros: bool = False

    def shape(self, whole: Shape) -> Shape:
        rows = sum(stop - start for start, stop in self.rows) + self.padding
        if self.columns is None:
            return (rows, *whole[1:])
        return (rows, self.columns[1] - self.columns[0], *whole[2:])


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def rank_parameters(spec: ModelSpec, mapping: RankMapping, rank: int) -> dict[str, str]:
    """Return the names in a rank's file → the model's parameters that they hold, all or in part."""
    stage = rank // mapping.tp_size
    last_stage = mapping.pp_size - 1
    per_stage = spec.layers // mapping.pp_size
    held = {}
    for parameter in checkpoint_shapes(spec):
        match = _LAYER.fullmatch(parameter)
        if match is None:
            wanted = last_stage if parameter.startswith((_HEAD, *_LAST)) else 0
            if stage == wanted:
                held[parameter] = parameter
        elif int(match.group(1)) // per_stage == stage:
            held[f"transformer.layers.{int(match.group(1)) % per_stage}.{match.group(2)}"] = (
                parameter
            )
    return held


def compute_part(spec: ModelSpec, parameter: str, whole: Shape, tp_rank: int, tp_size: int) -> Part:
    """Return the part of a parameter of shape `whole` that a tensor-parallel rank holds."""
    everything = Part(((0, whole[0]),))
    if tp_size == 1:
        return everything
    if ".attention.qkv." in parameter:
        return Part(_qkv_rows(spec, tp_rank, tp_size))
    if spec.qk_norm_per_head and ("_layernorm." in parameter and ".attention." in parameter):
        return engine_part(spec, parameter, whole, tp_rank, tp_size)
    if parameter.endswith(_BY_HEAD):
        return Part((_share(whole[0], tp_rank, tp_size),))
    if ".mlp.fc." in parameter or ".mlp.gate." in parameter:
        return Part((_share(whole[0], tp_rank, tp_size),))
    if spec.experts is not None and ".mlp.experts.gate_up." in parameter:
        return Part(_expert_rows(2 * spec.experts.count, spec.experts.ffn_size, tp_rank, tp_size))
    if spec.experts is not None and ".mlp.shared.gate_up." in parameter:
        return Part(_expert_rows(2, spec.experts.shared_ffn_size, tp_rank, tp_size))
    if parameter.endswith((".attention.dense.weight", ".proj.weight")):
        return Part(((0, whole[0]),), _share(whole[1], tp_rank, tp_size))
    if parameter.startswith(_HEAD):
        each = math.ceil(whole[0] / tp_size)
        start = min(tp_rank * each, whole[0])
        stop = min((tp_rank + 1) * each, whole[0])
        return Part(((start, stop),), padding=each - (stop - start))
    return everything


def engine_part(spec: ModelSpec, name: str, whole: Shape, rank: int, ranks: int) -> Part:
    """Return the part of an engine's tensor of shape `whole` that a rank has.

    A row's bias and scale go with the row. Where columns are split, all ranks have the scales of
    all rows, and of int4 those of their groups; the first rank has the bias.
    """
    everything = Part(((0, whole[0]),))
    linear, _, kind = name.rpartition(".")
    if ranks == 1:
        return everything
    if linear.endswith(".attention.qkv"):
        return Part(_qkv_rows(spec, rank, ranks))
    if spec.qk_norm_per_head and linear.endswith((".q_layernorm", ".k_layernorm")):
        queries, keys, _ = _qkv_rows(spec, rank, ranks)
        return Part((queries if linear.endswith(".q_layernorm") else _moved(keys, -spec.q_size),))
    if linear.endswith(".mlp.fc") or name.endswith(_BY_HEAD):
        return Part((_share(whole[0], rank, ranks),))
    if linear.endswith((".mlp.gate_up", ".shared.gate_up")):
        return Part(_expert_rows(2, whole[0] // 2, rank, ranks))
    if ".mlp.experts." in name and spec.experts is not None:
        held = spec.experts.held_by(rank, ranks)
        if len(held) < spec.experts.count:
            each = whole[0] // spec.experts.count
            return Part(((held.start * each, held.stop * each),))
        if linear.endswith(".gate_up"):
            halves = 2 * spec.experts.count
            return Part(_expert_rows(halves, whole[0] // halves, rank, ranks))
    if linear.endswith((".attention.dense", ".proj")):
        if len(whole) > 1:
            return Part(((0, whole[0]),), _share(whole[1], rank, ranks))
        return Part(((0, whole[0]),), zeros=kind == "bias" and rank > 0)
    if name.startswith(_HEAD):
        tokens = spec.vocabulary_of(rank, ranks)
        return Part(((tokens.start, tokens.stop),))
    return everything


def _moved(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def _share(size: int, tp_rank: int, tp_size: int) -> Range:
    each = size // tp_size
    return tp_rank * each, (tp_rank + 1) * each


def _expert_rows(halves: int, ffn_size: int, tp_rank: int, tp_size: int) -> tuple[Range, ...]:
    """Return the rows of a rank: the same share of both halves (gate and up) of every expert."""
    start, stop = _share(ffn_size, tp_rank, tp_size)
    return tuple((half * ffn_size + start, half * ffn_size + stop) for half in range(halves))


def _qkv_rows(spec: ModelSpec, tp_rank: int, tp_size: int) -> tuple[Range, ...]:
    queries = _share(spec.q_size, tp_rank, tp_size)
    heads = spec.kv_heads_of(tp_rank, tp_size)
    start = heads.start * spec.head_size
    stop = heads.stop * spec.head_size
    keys = spec.q_size
    values = spec.q_size + spec.kv_size
    return queries, (keys + start, keys + stop), (values + start, values + stop)


def slice_part(blocks: Iterable[torch.Tensor], part: Part) -> Iterator[torch.Tensor]:
    """Yield the rows and columns of a part, out of a parameter that arrives in blocks of rows."""
    offset = 0
    last = None
    for block in blocks:
        for start, stop in part.rows:
            low = max(start, offset)
            high = min(stop, offset + block.shape[0])
            if low < high:
                chosen = block[low - offset : high - offset]
                yield chosen[:, slice(*part.columns)].contiguous() if part.columns else chosen
        offset += block.shape[0]
        last = block
    if part.padding and last is not None:
        yield last.new_zeros((part.padding, *last.shape[1:]))


class RankedTensors:
    """The parameters of a model, joined from the files of all ranks."""

    def __init__(self, folder: Path, spec: ModelSpec, mapping: RankMapping) -> None:
        self._spec = spec
        self._mapping = mapping
        self._ranks = [
            _open_rank(folder, spec, mapping, rank) for rank in range(mapping.world_size)
        ]
        self._shapes = checkpoint_shapes(spec)

    @property
    def dtype(self) -> str | None:
        return self._ranks[0].dtype

    def shapes(self) -> Mapping[str, Shape]:
        """Return the joined shape of each parameter, or the stored shape if it is unexpected."""
        shapes: dict[str, Shape] = {}
        for rank, tensors in enumerate(self._ranks):
            for name, slot in tensors.slots.items():
                whole = self._shapes.get(name)
                expected = whole and self._part(name, whole, rank).shape(whole)
                shapes[name] = whole if whole is not None and slot.shape == expected else slot.shape
        return shapes

    def _part(self, name: str, whole: Shape, rank: int) -> Part:
        return compute_part(
            self._spec, name, whole, rank % self._mapping.tp_size, self._mapping.tp_size
        )

    def read_rows(self, name: str) -> Iterator[torch.Tensor]:
        whole = self._shapes[name]
        held = [
            (tensors, self._part(name, whole, rank))
            for rank, tensors in enumerate(self._ranks)
            if name in tensors.slots
        ]
        if held[0][1].columns:
            yield from _join_columns(tensors.read_rows(name) for tensors, _ in held)
            return
        for tensors, local in _order_rows(held):
            yield from tensors.read_rows(name, *local)

    def fingerprint(self) -> str:
        return "\n".join(tensors.fingerprint() for tensors in self._ranks)


def _open_rank(folder: Path, spec: ModelSpec, mapping: RankMapping, rank: int) -> MappedTensors:
    names = rank_parameters(spec, mapping, rank)
    return MappedTensors([folder / rank_file(rank)], lambda stored: names.get(stored, stored))


def _join_columns(streams: Iterable[Iterator[torch.Tensor]]) -> Iterator[torch.Tensor]:
    import torch

    for blocks in zip(*streams, strict=True):  # blocks of equal shapes hold the same rows
        yield torch.cat(blocks, dim=1)


def _order_rows(
    held: Sequence[tuple[MappedTensors, Part]],
) -> Iterator[tuple[MappedTensors, Range]]:
    """Yield (tensors, rows) of the ranks so that each row appears once, in order."""
    found: dict[Range, tuple[MappedTensors, Range]] = {}
    for tensors, part in held:
        local = 0
        for start, stop in part.rows:
            found.setdefault((start, stop), (tensors, (local, local + stop - start)))
            local += stop - start
    for rows in sorted(found):
        yield found[rows]
