"""One rank's part of an engine: its spec and its tensors.

An engine folder holds whole tensors and is bound to no number of ranks. Each rank reads its parts
out of the file, and never has a whole tensor that it shares with others in memory. The server
process, which has no torch, asks here how many ranks a model allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.blocks import BlockMatrix
from slipstream.kernels.stored import StoredArray, shape_of
from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import Quantisation
from slipstream.weights.rank_split import Part, engine_part

if TYPE_CHECKING:
    import torch

    from slipstream.kernels.stored import Weight
    from slipstream.weights.engine_folder import EngineFolder

_MOST_NAMED = 64  # ranks that a message names


def rank_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return the spec of one rank's part of a model. Hidden size and vocabulary stay whole."""
    if ranks == 1:
        return spec
    experts = spec.experts
    if experts is not None:
        sliced = experts.count % ranks != 0
        experts = replace(
            experts,
            ffn_size=experts.ffn_size // ranks if sliced else experts.ffn_size,
            shared_ffn_size=experts.shared_ffn_size // ranks,
        )
    has_plain_layers = spec.experts is None or spec.experts.layers is not None
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        ffn_size=spec.ffn_size // ranks if has_plain_layers else spec.ffn_size,
        experts=experts,
    )


def check_ranks(spec: ModelSpec, quantisation: Quantisation, ranks: int) -> None:
    """Raise ValueError if a model cannot be divided among this many ranks."""
    if ranks < 1:
        raise ValueError(f"tp_size must be at least 1, not {ranks}")
    if problem := _problem(spec, quantisation, ranks):
        counts = [n for n in range(1, _MOST_NAMED + 1) if not _problem(spec, quantisation, n)]
        possible = ", ".join(map(str, counts))
        raise ValueError(
            f"tp_size {ranks} does not divide this model: {problem}; possible numbers of ranks: "
            f"{possible}"
        )


def possible_ranks(spec: ModelSpec, quantisation: Quantisation, most: int) -> int:
    """Return the largest number of ranks, at most `most`, that a model can be divided among."""
    found = (n for n in range(most, 1, -1) if not _problem(spec, quantisation, n))
    return next(found, 1)


def _problem(spec: ModelSpec, quantisation: Quantisation, ranks: int) -> str:
    """Return why a model cannot be divided among this many ranks; empty: it can."""
    if spec.heads % ranks:
        return f"it has {spec.heads} heads"
    if spec.has_layer_norm_of_all_heads and ranks > 1:
        return "it has layer norms over all queries and all keys"
    smaller, larger = sorted((spec.kv_heads, ranks))
    if larger % smaller:
        return f"it has {spec.kv_heads} KV heads"
    columns = _split_columns(spec, ranks)
    for size in columns:
        if size % ranks:
            return f"it has {size} feed-forward columns"
    group = quantisation.group_size or 1
    for size in (spec.attended_size, *columns):
        if size // ranks % group:
            return (
                f"a rank would have {size // ranks} columns of int4 weights, whose groups have "
                f"{group}"
            )
    if not len(spec.vocabulary_of(ranks - 1, ranks)):
        return f"it has a vocabulary of {spec.vocab_size}"
    return ""


def _split_columns(spec: ModelSpec, ranks: int) -> list[int]:
    """Return the feed-forward sizes that are divided among the ranks."""
    experts = spec.experts
    if experts is None:
        return [spec.ffn_size]
    sizes = [] if experts.count % ranks == 0 else [experts.ffn_size]
    if experts.shared_ffn_size:
        sizes.append(experts.shared_ffn_size)
    if experts.layers is not None:
        sizes.append(spec.ffn_size)
    return sizes


def rank_tensors(
    folder: EngineFolder, rank: int, ranks: int, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank of a whole engine. dtype: as in `EngineFolder.tensors`"""
    import torch

    if ranks == 1:
        return folder.tensors(dtype=dtype)
    check_ranks(folder.spec, folder.quantisation, ranks)
    expanded = dtype or getattr(torch, folder.dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in folder.weights().items():
        part = engine_part(folder.spec, name, shape_of(weight), rank, ranks)
        tensors[name] = _read(weight, part, expanded)
    return tensors


def rank_weights(folder: EngineFolder, rank: int, ranks: int) -> dict[str, Weight]:
    """Return the weights of one rank of a whole engine as stored. Blocks whose columns are divided
    are expanded.
    """
    check_ranks(folder.spec, folder.quantisation, ranks)
    found: dict[str, Weight] = {}
    for name, weight in folder.weights().items():
        part = engine_part(folder.spec, name, shape_of(weight), rank, ranks)
        if not isinstance(weight, BlockMatrix):
            found[name] = _cut(weight, part)
        elif part.columns is None:
            found[name] = weight.take(part.rows)
        else:
            first, last = part.columns
            values = [rows[:, first:last] for rows in weight.take(part.rows).expand()]
            found[name] = StoredArray("F32", np.concatenate(values))
    return found


def _read(weight: Weight, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """Return a part of a weight. dtype: to expand blocks to, which columns may divide"""
    from slipstream.weights.torch_tensors import expand, map_tensor

    if isinstance(weight, BlockMatrix):
        return expand(weight.take(part.rows), dtype, part.columns)
    return map_tensor(_cut(weight, part))


def _cut(weight: StoredArray, part: Part) -> StoredArray:
    """Return a part of a weight: the same memory if it is the whole."""
    if part == Part(((0, len(weight.array)),)):
        return weight
    pieces = [weight.array[first:last] for first, last in part.rows]
    if part.columns is not None:
        pieces = [piece[:, slice(*part.columns)] for piece in pieces]
    found = np.concatenate(pieces)
    return weight._replace(array=np.zeros_like(found) if part.zeros else found)
