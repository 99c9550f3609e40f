"""Attention of a step's new tokens over the paged cache.

A cache layer is [kv_heads, slots, head_size]; slot = block × block_tokens + offset. With heads
outermost, the blocks of a row gather into one contiguous matrix a head, which is what matrix
products are fast on. An `AttentionPlan` is made once a step and serves every layer. Rows that
compute one token (decode) are taken together, gathered and masked to a common length; rows that
compute several are taken one by one. A row that looks through a window has null blocks where it has
let go of what it passed; those that begin its table are not gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.attention_rule import AttentionRule

# Rows of very different lengths are not gathered together: the short ones would be padded at a
# cost.
_MOST_PADDING = 2.0
# From this many gathered tokens on, two batched products beat torch's fused attention for single
# queries. Not so where one row's slots are a run: its keys are then a view with gaps between heads,
# which products are slow on.
_PRODUCTS_FROM_TOKENS = 512
_NULL_BLOCK = 0  # nobody's, and all zeros
# Queries of a prompt taken at once; larger tiles compute more that is masked away, smaller ones
# call more often.
_TILE_TOKENS = 64


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one new token each."""

    tokens: Tensor | slice  # which tokens of the step
    # [rows * kv_heads * blocks] blocks to gather, or the one row's slots when they are a run
    where: Tensor | slice
    rows: int
    first: int  # position of the first token gathered
    length: int  # what the rows are padded to, from there on
    lengths: Tensor  # [rows]: where they end
    masks: dict[AttentionRule, Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class PrefillRow:
    """One row of several new tokens."""

    tokens: slice
    where: Tensor | slice  # [kv_heads * blocks] blocks to gather, or slots when they are a run
    first: int  # position of the first token gathered
    start: int  # tokens that were computed before this step
    length: int


@dataclass(slots=True)
class AttentionPlan:
    block_tokens: int
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """queries: [tokens, heads, head_size]; keys, values: [kv_heads, slots, head_size], the
        step's own already in → [tokens, heads, head_size]
        """
        if len(self.decodes) == 1 and not self.prefills:
            return _attend_decode(queries, keys, values, self.decodes[0], self.block_tokens, rule)
        output = queries.new_empty(queries.shape)
        for group in self.decodes:
            output[group.tokens] = _attend_decode(
                queries[group.tokens], keys, values, group, self.block_tokens, rule
            )
        for row in self.prefills:
            k, v = (
                _gather(t, row.where, 1, self.block_tokens)[0, :, : row.length - row.first]
                for t in (keys, values)
            )
            output[row.tokens] = _attend_prefill(queries[row.tokens], k, v, row, rule)
        return output


def cache_shape(layers: int, slots: int, kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Layers, keys and values, then one layer's keys."""
    return (layers, 2, kv_heads, slots, head_size)


def plan_attention(
    tables: np.ndarray,  # [rows of the step, blocks]
    positions: np.ndarray,  # [rows of the step]: first position each computes
    counts: np.ndarray,  # [rows of the step]: tokens each computes
    block_tokens: int,
    cache: Tensor,  # of cache_shape
) -> AttentionPlan:
    """Host work that depends on rows and blocks, never on tokens one by one."""
    heads, cache_blocks = cache.shape[2], cache.shape[3] // block_tokens
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lengths = positions + counts
    plan = AttentionPlan(block_tokens, [], [])
    for members in _similar(np.flatnonzero(counts == 1), lengths):
        blocks = -(-int(lengths[members].max()) // block_tokens)
        passed = _passed(tables[members, :blocks])
        # What lies behind a row's end is masked, but must be finite all the same: no other row's
        # blocks, then.
        used = np.arange(passed, blocks) < -(-lengths[members, None] // block_tokens)
        own, first = (
            np.where(used, tables[members, passed:blocks], _NULL_BLOCK),
            passed * block_tokens,
        )
        where, length = _where(own, lengths[members] - first, block_tokens, heads, cache_blocks)
        ends = torch.from_numpy(lengths[members])
        plan.decodes.append(
            DecodeGroup(_tokens(offsets[members]), where, len(members), first, length, ends)
        )
    for row in np.flatnonzero(counts > 1):
        length = int(lengths[row])
        table = tables[row : row + 1, : -(-length // block_tokens)]
        first = _passed(table) * block_tokens
        own = table[:, first // block_tokens :]
        where, _ = _where(own, lengths[row : row + 1] - first, block_tokens, heads, cache_blocks)
        tokens = slice(int(offsets[row]), int(offsets[row + 1]))
        plan.prefills.append(PrefillRow(tokens, where, first, int(positions[row]), length))
    return plan


def _passed(tables: np.ndarray) -> int:
    """How many blocks at the beginning none of these rows has any more."""
    return int((tables != _NULL_BLOCK).argmax(axis=1).min())


def _attend_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: DecodeGroup,
    block_tokens: int,
    rule: AttentionRule,
) -> Tensor:
    """q: [rows, heads, head_size] → the same shape."""
    rows, heads, size = q.shape
    # [rows, kv_heads, length, size]
    k, v = (_gather(t, group.where, rows, block_tokens) for t in (keys, values))
    if rule not in group.masks:
        group.masks[rule] = _decode_mask(group, rule, q.dtype)
    mask = group.masks[rule]
    # The queries that share a key head stand as several queries of one head: keys are read once for
    # all.
    grouped = q.reshape(rows, len(keys), heads // len(keys), size)
    few = rows * group.length < _PRODUCTS_FROM_TOKENS or isinstance(group.where, slice)
    if few and not rule.softcap:
        out = functional.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, scale=rule.scale
        )
    else:
        scores = _squeeze(torch.matmul(grouped * rule.scale, k.transpose(2, 3)), rule)
        weights = torch.softmax(scores if mask is None else scores.add_(mask), dim=-1)
        out = torch.matmul(weights, v)
    return out.reshape(rows, heads, size)


def _attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, row: PrefillRow, rule: AttentionRule
) -> Tensor:
    """q: [new tokens, heads, head_size]; k, v: [kv_heads, length - first, head_size] → as q.

    Queries are taken in tiles: a tile leaves out the keys after it, and its scores stay in the
    cache.
    """
    count, heads, size = q.shape
    group = heads // len(k)
    by_key_head = (q * rule.scale).reshape(count, len(k), group, size).transpose(0, 1)
    output = q.new_empty(q.shape)
    for begin in range(0, count, _TILE_TOKENS):
        end = min(begin + _TILE_TOKENS, count)
        first, last = row.start + begin, row.start + end  # positions of the tile's queries
        oldest = (
            row.first
            if rule.window is None or rule.sinks
            else max(row.first, first - rule.window + 1)
        )
        queries = by_key_head[:, begin:end].reshape(len(k), -1, size)
        keys = slice(oldest - row.first, last - row.first)
        scores = _squeeze(torch.bmm(queries, k[:, keys].transpose(1, 2)), rule)
        scores = scores.view(len(k), end - begin, group, -1)
        scores += _tile_mask(first, last, oldest, rule, q.dtype, q.device)[:, None, :]
        weights = torch.softmax(scores, dim=-1).view(len(k), -1, last - oldest)
        tile = torch.bmm(weights, v[:, keys]).view(len(k), end - begin, heads // len(k), size)
        output[begin:end] = tile.transpose(0, 1).reshape(end - begin, heads, size)
    return output


def _squeeze(scores: Tensor, rule: AttentionRule) -> Tensor:
    return scores if not rule.softcap else torch.tanh(scores / rule.softcap).mul_(rule.softcap)


def _gather(cache: Tensor, where: Tensor | slice, rows: int, block_tokens: int) -> Tensor:
    """cache: [kv_heads, slots, head_size] → [rows, kv_heads, length, head_size]; no copy when slots
    are a run.
    """
    heads, _, size = cache.shape
    if isinstance(where, slice):
        return cache[None, :, where]
    blocks = cache.view(-1, block_tokens * size)  # [kv_heads * blocks, …]
    return blocks.index_select(0, where).view(rows, heads, -1, size)


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


def _tokens(first: np.ndarray) -> Tensor | slice:
    """Which tokens of the step; a plain slice when they follow each other."""
    if first[-1] - first[0] == len(first) - 1:
        return slice(int(first[0]), int(first[-1]) + 1)
    return torch.from_numpy(first)


def _where(
    tables: np.ndarray, lengths: np.ndarray, block_tokens: int, heads: int, cache_blocks: int
) -> tuple[Tensor | slice, int]:
    """How to gather these rows, and the length they are padded to."""
    if len(tables) == 1 and (np.diff(tables[0]) == 1).all():
        start = int(tables[0, 0]) * block_tokens
        return slice(start, start + int(lengths[0])), int(lengths[0])
    by_head = tables[:, None, :].astype(np.int64) + (np.arange(heads) * cache_blocks)[None, :, None]
    return torch.from_numpy(by_head.reshape(-1)), tables.shape[1] * block_tokens


def _decode_mask(group: DecodeGroup, rule: AttentionRule, dtype: torch.dtype) -> Tensor | None:
    """[rows, 1, 1, length]: 0 where a row may look, -inf elsewhere; None when it may look
    everywhere.
    """
    lengths = group.lengths[:, None]
    whole = bool((lengths == group.first + group.length).all())
    if whole and (rule.window is None or rule.window >= group.length):
        return None
    position = torch.arange(group.first, group.first + group.length)[None, :]
    seen = position < lengths
    if rule.window is not None:
        seen &= (position >= lengths - rule.window) | (position < rule.sinks)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None, :]


def _tile_mask(
    first: int,
    last: int,
    oldest: int,
    rule: AttentionRule,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[last - first, last - oldest]: 0 where a query may look, -inf elsewhere."""
    query = torch.arange(first, last, device=device)[:, None]
    position = torch.arange(oldest, last, device=device)[None, :]
    hidden = position > query
    if rule.window is not None:
        hidden |= (position <= query - rule.window) & (position >= rule.sinks)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
