"""Orders of the rows of a fused or rotary weight that differ from what the kernels want."""

from __future__ import annotations

from slipstream.model.spec import ModelSpec


def grouped_heads(spec: ModelSpec) -> list[int]:
    """For files that hold each key head's queries, key and value together: all queries, all keys,
    all values.
    """
    size, group = spec.head_size, spec.heads // spec.kv_heads
    queries = [
        head * (group + 2) + query for head in range(spec.kv_heads) for query in range(group)
    ]
    keys = [head * (group + 2) + group for head in range(spec.kv_heads)]
    values = [key + 1 for key in keys]
    return [head * size + row for head in queries + keys + values for row in range(size)]


def paired_rotation(spec: ModelSpec) -> list[int]:
    """For models that turn neighbours together: the first of all pairs, then the second of all, in
    every query and key; what is not turned, and values, as they are.
    """
    turned = round(spec.head_size * spec.rotary_fraction)
    head = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, spec.head_size)]
    rows = [
        start + row
        for start in range(0, spec.q_size + spec.kv_size, spec.head_size)
        for row in head
    ]
    return [*rows, *range(spec.q_size + spec.kv_size, spec.qkv_size)]
