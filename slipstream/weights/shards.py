"""One rank's part of an engine: its spec and its tensors.

An engine folder holds whole tensors and is bound to no number of ranks. Each rank reads its parts
out of the file, and never has a whole tensor that it shares with others in memory. The server
process, which has no torch, asks here how many ranks a model allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.model.spec import ModelSpec
from slipstream.weights.parameters import Quantisation
from slipstream.weights.rank_split import Part, engine_part

if TYPE_CHECKING:
    import torch

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
    if spec.qk_norm and spec.qk_norm_kind == "all" and ranks > 1:
        return "it normalises queries and keys over all heads together"
    smaller, larger = sorted((spec.kv_heads, ranks))
    if larger % smaller:
        return f"it has {spec.kv_heads} KV heads"
    columns = _split_columns(spec, ranks)
    for size in columns:
        if size % ranks:
            return f"it has {size} feed-forward columns"
    group = quantisation.group_size if quantisation.bits == 4 else 1
    for size in (spec.q_size, *columns):
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


def rank_tensors(folder: EngineFolder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank of a whole engine."""
    from safetensors import safe_open

    from slipstream.weights.engine_folder import rank_file

    if ranks == 1:
        return folder.tensors()
    check_ranks(folder.spec, folder.quantisation, ranks)
    folder.check_tensors()
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(rank_file(folder.path, 0), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  `file` is not a dict: it has no iterator
            stored = file.get_slice(name)
            whole = tuple(stored.get_shape())
            part = engine_part(folder.spec, name, whole, rank, ranks)
            if part == Part(((0, whole[0]),)):
                tensors[name] = file.get_tensor(name)
            else:
                tensors[name] = _read(stored, part)
    return tensors


def _read(stored: Any, part: Part) -> torch.Tensor:
    """Return a part of a stored tensor. stored: a slice of safetensors"""
    import torch

    rows = part.rows
    if part.columns is None:
        pieces = [stored[first:last] for first, last in rows]
    else:
        columns = slice(*part.columns)
        pieces = [stored[first:last, columns] for first, last in rows]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return torch.zeros_like(found) if part.zeros else found
