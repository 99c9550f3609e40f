"""Attention of a step's new tokens over the paged cache, and the writing of their keys and values.

A cache layer is [slots, kv_heads, head_size]; slot = block × block_tokens + offset. An `AttentionPlan` is made
once a step and serves every layer. Rows that compute one token (decode) are taken together, gathered and
masked to a common length; rows that compute several are taken one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Rows of very different lengths are not gathered together: the short ones would be padded at a cost.
_MOST_PADDING = 2.0


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one new token each."""

    tokens: Tensor | slice  # which tokens of the step
    slots: Tensor | slice  # [rows * length]: where their keys and values lie, padded with the null block's
    rows: int
    length: int
    lengths: Tensor  # [rows]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window


@dataclass(slots=True)
class PrefillRow:
    """One row of several new tokens."""

    tokens: slice
    slots: Tensor | slice  # [length]
    start: int  # tokens that were computed before this step
    length: int
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window


@dataclass(slots=True)
class AttentionPlan:
    slots: Tensor  # [tokens]: where the step's own keys and values go
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]


def plan_attention(
    tables: np.ndarray,  # [rows of the step, blocks]
    positions: np.ndarray,  # [rows of the step]: first position each computes
    counts: np.ndarray,  # [rows of the step]: tokens each computes
    slots: Tensor,  # [tokens]
    block_tokens: int,
) -> AttentionPlan:
    """Host work that depends on rows and blocks, never on tokens one by one."""
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lengths = positions + counts
    plan = AttentionPlan(slots, [], [])
    single = np.flatnonzero(counts == 1)
    for members in _similar(single, lengths):
        plan.decodes.append(_decode_group(members, tables, lengths, offsets, block_tokens))
    for row in np.flatnonzero(counts > 1):
        length = int(lengths[row])
        plan.prefills.append(PrefillRow(
            tokens=slice(int(offsets[row]), int(offsets[row + 1])),
            slots=_slots_of(tables[row], length, block_tokens),
            start=int(positions[row]),
            length=length,
        ))
    return plan


def write_cache(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """keys, values: [slots, kv_heads, head_size]; k, v: [tokens, kv_heads, head_size]; slots: [tokens]."""
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def attend(
    q: Tensor,  # [tokens, heads, head_size]
    k: Tensor,  # [tokens, kv_heads, head_size], already written to the cache
    v: Tensor,
    keys: Tensor,  # [slots, kv_heads, head_size]
    values: Tensor,
    plan: AttentionPlan,
    window: int | None,
) -> Tensor:
    """→ [tokens, heads, head_size]"""
    output = torch.empty_like(q)
    for group in plan.decodes:
        output[group.tokens] = _attend_decode(q[group.tokens], keys, values, group, window)
    for row in plan.prefills:
        output[row.tokens] = _attend_prefill(q[row.tokens], k, v, keys, values, row, window)
    return output


def _attend_decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, window: int | None) -> Tensor:
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    shape = (rows, group.length, kv_heads, size)
    k = keys[group.slots].view(shape).transpose(1, 2)
    v = values[group.slots].view(shape).transpose(1, 2)
    if window not in group.masks:
        group.masks[window] = _decode_mask(group, window, q.dtype)
    # The queries that share a key head stand as several queries of one head: keys are read once for all.
    grouped = q.view(rows, kv_heads, heads // kv_heads, size)
    out = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.masks[window])
    return out.reshape(rows, heads, size)


def _attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, window: int | None
) -> Tensor:
    if row.start == 0:  # all it looks at was computed in this step
        k, v = k[row.tokens], v[row.tokens]
    else:
        k, v = keys[row.slots], values[row.slots]
    if window not in row.masks:
        row.masks[window] = _prefill_mask(row, window, q.device)
    mask = row.masks[window]
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
        attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _similar(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cut rows, longest first, into groups within which padding stays bounded."""
    groups: list[np.ndarray] = []
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    while len(order):
        longest = lengths[order[0]]
        near = lengths[order] * _MOST_PADDING >= longest
        groups.append(np.sort(order[near]))
        order = order[~near]
    return groups


def _decode_group(
    members: np.ndarray, tables: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, block_tokens: int
) -> DecodeGroup:
    first = offsets[members]
    contiguous = first[-1] - first[0] == len(first) - 1
    tokens = slice(int(first[0]), int(first[-1]) + 1) if contiguous else torch.from_numpy(first)
    if len(members) == 1:
        length = int(lengths[members[0]])
        slots = _slots_of(tables[members[0]], length, block_tokens)
    else:
        blocks = -(-int(lengths[members].max()) // block_tokens)
        length = blocks * block_tokens
        slots = _block_slots(tables[members, :blocks], block_tokens)
    return DecodeGroup(tokens, slots, len(members), length, torch.from_numpy(lengths[members]))


def _slots_of(table: np.ndarray, length: int, block_tokens: int) -> Tensor | slice:
    """Where a row's first `length` tokens lie; a plain slice when its blocks follow each other."""
    blocks = table[: -(-length // block_tokens)]
    if blocks[-1] - blocks[0] == len(blocks) - 1 and (np.diff(blocks) == 1).all():
        start = int(blocks[0]) * block_tokens
        return slice(start, start + length)
    return _block_slots(blocks[None, :], block_tokens)[:length]


def _block_slots(tables: np.ndarray, block_tokens: int) -> Tensor:
    slots = tables[:, :, None].astype(np.int64) * block_tokens + np.arange(block_tokens)
    return torch.from_numpy(slots.reshape(-1))


def _decode_mask(group: DecodeGroup, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1, 1, length]: 0 where a row may look, -inf elsewhere; None when it may look everywhere."""
    lengths = group.lengths[:, None]
    if bool((lengths == group.length).all()) and (window is None or window >= group.length):
        return None
    position = torch.arange(group.length)[None, :]
    seen = position < lengths
    if window is not None:
        seen &= position >= lengths - window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None, :]


def _prefill_mask(row: PrefillRow, window: int | None, device: torch.device) -> Tensor | None:
    """[new tokens, length] of bool; None when plain causal attention from position 0 is meant."""
    if row.start == 0 and (window is None or window >= row.length):
        return None
    query = torch.arange(row.start, row.length, device=device)[:, None]
    position = torch.arange(row.length, device=device)[None, :]
    seen = position <= query
    if window is not None:
        seen &= position > query - window
    return seen
