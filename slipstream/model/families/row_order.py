"""Row orders of fused and rotary weights in files, where they differ from the kernels' order."""

from __future__ import annotations

from slipstream.model.spec import ModelSpec


def grouped_heads(spec: ModelSpec) -> list[int]:
    """Return the order for files that hold each KV head's queries, key and value together: all
    queries, all keys, all values.
    """
    size = spec.head_size
    group = spec.heads // spec.kv_heads
    keys = [kv_head * (group + 2) + group for kv_head in range(spec.kv_heads)]
    values = [key + 1 for key in keys]
    queries: list[int] = []
    for key in keys:
        queries += range(key - group, key)
    rows: list[int] = []
    for head in queries + keys + values:
        rows += range(head * size, (head + 1) * size)
    return rows


def paired_rotation(spec: ModelSpec) -> list[int]:
    """Return the order for models that rotate neighbouring columns together: the first columns of
    all pairs, then the second ones, in every query and key. Other columns and values are unchanged.
    """
    return [
        *paired_heads(spec, spec.heads + spec.kv_heads),
        *range(spec.q_size + spec.kv_size, spec.qkv_size),
    ]


def paired_heads(spec: ModelSpec, heads: int) -> list[int]:
    """Return the same order of the columns of some queries or keys."""
    rotated = round(spec.head_size * spec.rotary_fraction)
    head = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, spec.head_size)]
    rows: list[int] = []
    for start in range(0, heads * spec.head_size, spec.head_size):
        rows += [start + row for row in head]
    return rows


def paired_latent_queries(spec: ModelSpec) -> list[int]:
    """Return the order for models with latent attention that rotate neighbouring columns together:
    of the rotated part of each query, the first columns of all pairs, then the second ones.
    """
    assert spec.latent is not None
    rows: list[int] = []
    for head in range(spec.heads):
        start = head * spec.latent.query_size
        rows += range(start, start + spec.latent.plain_size)
        rows += _unpaired(start + spec.latent.plain_size, spec.latent.rope_size)
    return rows


def paired_latent_key(spec: ModelSpec) -> list[int]:
    """Return the same order for the latent vector and the rotated key behind it."""
    assert spec.latent is not None
    return [*range(spec.latent.kv_rank), *_unpaired(spec.latent.kv_rank, spec.latent.rope_size)]


def _unpaired(start: int, size: int) -> list[int]:
    return [*range(start, start + size, 2), *range(start + 1, start + size, 2)]


def paired_expert_halves(spec: ModelSpec) -> list[int]:
    """Return the order for files that hold the gate and up projections of an expert row by row in
    turn: the gate projection of each expert, then its up projection.
    """
    assert spec.experts is not None
    size = 2 * spec.experts.ffn_size
    rows: list[int] = []
    for start in range(0, spec.experts.count * size, size):
        rows += range(start, start + size, 2)
        rows += range(start + 1, start + size, 2)
    return rows


def expert_halves(spec: ModelSpec) -> list[int]:
    """Return the order for files that hold the gate projections of all experts, then all up
    projections: both of one expert after the other.
    """
    assert spec.experts is not None
    size = spec.experts.ffn_size
    second = spec.experts.count * size
    rows: list[int] = []
    for start in range(0, second, size):
        rows += range(start, start + size)
        rows += range(second + start, second + start + size)
    return rows
