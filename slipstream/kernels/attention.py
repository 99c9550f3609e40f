"""Attention of a step's new tokens over the paged cache, on a CPU.

A cache layer is [kv_heads, slots, head_size]; slot = block × block_tokens + offset. With heads
outermost, the blocks of a row gather into one contiguous matrix per head, which GEMMs are fast on.
An `AttentionPlan` is made once per step and serves every layer. Rows that compute one token
(decode) are gathered together and masked to a common length; rows that compute several are taken
one by one. A row with a sliding window has null blocks for the tokens outside it; those at the
start of its table are not gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.attention_rule import AttentionRule, Slopes

# Rows of very different lengths are not gathered together: padding the short ones costs time.
_MAX_PADDING = 2.0
# From this many gathered tokens on, two batched GEMMs beat torch's fused attention for single
# queries. This does not hold where one row's slots are contiguous: its keys are then a view with
# gaps between heads, which GEMMs are slow on.
_GEMM_FROM_TOKENS = 512
_NULL_BLOCK = 0  # the block that no row owns: all zeros
# Queries of a prompt that are taken at once; larger tiles compute more that is masked, smaller ones
# need more calls.
_TILE_TOKENS = 64


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one new token each."""

    tokens: Tensor | slice  # indices in the step
    # [rows * kv_heads * blocks] blocks to gather, or the slots of a single row if contiguous
    where: Tensor | slice
    rows: int
    first: int  # position of the first gathered token
    length: int  # gathered tokens per row, with padding
    lengths: Tensor  # [rows]: tokens of each row, from position 0
    masks: dict[AttentionRule, Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class PrefillRow:
    """One row of several new tokens."""

    tokens: slice
    where: Tensor | slice  # [kv_heads * blocks] blocks to gather, or slots if contiguous
    first: int  # position of the first gathered token
    start: int  # tokens computed before this step
    length: int  # tokens of the row, with the step's own


@dataclass(slots=True)
class AttentionPlan:
    block_tokens: int
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return [tokens, heads, head_size], or the rule's value_size.

        queries: [tokens, heads, head_size]; keys, values: [kv_heads, slots, head_size], with the
        step's own tokens; values are not read if the keys hold them
        """
        if len(self.decodes) == 1 and not self.prefills:
            return _attend_decode(queries, keys, values, self.decodes[0], self.block_tokens, rule)
        size = values.shape[-1] if rule.value_size is None else rule.value_size
        output = queries.new_empty((*queries.shape[:2], size))
        for group in self.decodes:
            output[group.tokens] = _attend_decode(
                queries[group.tokens], keys, values, group, self.block_tokens, rule
            )
        for row in self.prefills:
            length = row.length - row.first
            k = gather(keys, row.where, 1, self.block_tokens)
            v = gather_values(k, values, row.where, self.block_tokens, rule)
            output[row.tokens] = _attend_prefill(
                queries[row.tokens], k[0, :, :length], v[0, :, :length], row, rule
            )
        return output


def plan_attention(
    tables: np.ndarray,  # [rows of the step, blocks]
    positions: np.ndarray,  # [rows of the step]: first position each computes
    counts: np.ndarray,  # [rows of the step]: tokens each computes
    block_tokens: int,
    cache: Tensor,  # of `cache_shape`
) -> AttentionPlan:
    """Plan a step. The work depends on rows and blocks, never on single tokens."""
    heads = cache.shape[2]
    cache_blocks = cache.shape[3] // block_tokens
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lengths = positions + counts
    plan = AttentionPlan(block_tokens, [], [])
    for members in _similar(np.flatnonzero(counts == 1), lengths):
        blocks = -(-int(lengths[members].max()) // block_tokens)
        skipped = _leading_null_blocks(tables[members, :blocks])
        # Blocks behind a row's end are masked but must be finite: the null block instead of others.
        used = np.arange(skipped, blocks) < -(-lengths[members, None] // block_tokens)
        own = np.where(used, tables[members, skipped:blocks], _NULL_BLOCK)
        first = skipped * block_tokens
        where, length = _where(own, lengths[members] - first, block_tokens, heads, cache_blocks)
        ends = torch.from_numpy(lengths[members])
        plan.decodes.append(
            DecodeGroup(_tokens(offsets[members]), where, len(members), first, length, ends)
        )
    for row in np.flatnonzero(counts > 1):
        length = int(lengths[row])
        table = tables[row : row + 1, : -(-length // block_tokens)]
        first = _leading_null_blocks(table) * block_tokens
        own = table[:, first // block_tokens :]
        where, _ = _where(own, lengths[row : row + 1] - first, block_tokens, heads, cache_blocks)
        tokens = slice(int(offsets[row]), int(offsets[row + 1]))
        plan.prefills.append(PrefillRow(tokens, where, first, int(positions[row]), length))
    return plan


def _leading_null_blocks(tables: np.ndarray) -> int:
    """Return the number of leading blocks that are null in all rows."""
    return int((tables != _NULL_BLOCK).argmax(axis=1).min())


def _attend_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: DecodeGroup,
    block_tokens: int,
    rule: AttentionRule,
) -> Tensor:
    """q: [rows, heads, head_size] → the same shape"""
    rows, heads, size = q.shape
    k = gather(keys, group.where, rows, block_tokens)  # [rows, kv_heads, length, size]
    v = gather_values(k, values, group.where, block_tokens, rule)
    if rule not in group.masks:
        group.masks[rule] = _decode_mask(group, rule, q.dtype)
    mask = group.masks[rule]
    # Queries that share a KV head become several queries of one head, so that keys are read once.
    grouped = q.reshape(rows, len(keys), heads // len(keys), size)
    few = rows * group.length < _GEMM_FROM_TOKENS or isinstance(group.where, slice)
    if few and not rule.softcap and rule.slopes is None and rule.sink_logits is None:
        out = functional.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, scale=rule.scale
        )
    else:
        scores = softcap(torch.matmul(grouped * rule.scale, k.transpose(2, 3)), rule)
        if rule.slopes is not None:
            bias = position_bias(rule.slopes, group.first, group.first + group.length)
            scores = scores + bias.view(len(keys), -1, group.length)
        scores = scores if mask is None else scores.add_(mask)
        weights = softmax(scores, sink_logits(rule, scores, (len(keys), -1, 1)))
        out = torch.matmul(weights.to(v.dtype), v)
    return out.reshape(rows, heads, -1)


def _attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, row: PrefillRow, rule: AttentionRule
) -> Tensor:
    """q: [new tokens, heads, head_size]; k, v: [kv_heads, length - first, head_size] → as q

    Queries are taken in tiles: a tile skips the keys after it, and its scores stay in the CPU's
    cache.
    """
    if not rule.causal:
        return _attend_both_ways(q, k, v, rule)
    count, heads, size = q.shape
    group = heads // len(k)
    by_kv_head = (q * rule.scale).reshape(count, len(k), group, size).transpose(0, 1)
    value_size = v.shape[-1]
    output = q.new_empty((count, heads, value_size))
    for begin in range(0, count, _TILE_TOKENS):
        end = min(begin + _TILE_TOKENS, count)
        first = row.start + begin  # position of the tile's first query
        last = row.start + end
        oldest = row.first
        if rule.window is not None and not rule.sinks:
            oldest = max(row.first, first - rule.window + 1)
        queries = by_kv_head[:, begin:end].reshape(len(k), -1, size)
        keys = slice(oldest - row.first, last - row.first)
        scores = softcap(torch.bmm(queries, k[:, keys].transpose(1, 2)), rule)
        scores = scores.view(len(k), end - begin, group, -1)
        if rule.slopes is not None:
            bias = position_bias(rule.slopes, oldest, last)
            scores = scores + bias.view(len(k), 1, group, -1)
        scores += tile_mask(first, last, oldest, rule, q.dtype, q.device)[:, None, :]
        weights = softmax(scores, sink_logits(rule, scores, (len(k), 1, group, 1)))
        weights = weights.view(len(k), -1, last - oldest).to(v.dtype)
        tile = torch.bmm(weights, v[:, keys]).view(len(k), end - begin, group, value_size)
        output[begin:end] = tile.transpose(0, 1).reshape(end - begin, heads, value_size)
    return output


def _attend_both_ways(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Arguments and result as of `_attend_prefill`; every query attends to all keys."""
    group = q.shape[1] // len(k)
    keys = k.repeat_interleave(group, dim=0)
    values = v.repeat_interleave(group, dim=0)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], scale=rule.scale
    )
    return out[0].transpose(0, 1)


def softcap(scores: Tensor, rule: AttentionRule) -> Tensor:
    if not rule.softcap:
        return scores
    return torch.tanh(scores / rule.softcap).mul_(rule.softcap)


def sink_logits(rule: AttentionRule, scores: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the sink logits of the heads in this shape, as `softmax` takes them."""
    if rule.sink_logits is None:
        return None
    return torch.tensor(rule.sink_logits, dtype=scores.dtype, device=scores.device).view(shape)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys: [..., keys]. sinks: [..., 1], of the same number of
    dimensions as scores or fewer, a logit beside those of the keys
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    beside = sinks.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, beside), dim=-1), dim=-1)[..., :-1].contiguous()


def position_bias(slopes: Slopes, first: int, last: int) -> Tensor:
    """Return the biases of the keys from `first` to `last` (exclusive): float32 [heads, keys].

    They are relative to the last key: what all scores of a query share has no effect. Biases that
    are rounded depend on the position itself.
    """
    by_head = torch.tensor(slopes.by_head)[:, None]
    if slopes.rounded:
        positions = torch.arange(first, last, dtype=torch.float32)
        return (by_head.bfloat16().float() * positions).bfloat16().float() * slopes.scale
    return by_head * torch.arange(first - last + 1, 1, dtype=torch.float32) * slopes.scale


def gather(cache: Tensor, where: Tensor | slice, rows: int, block_tokens: int) -> Tensor:
    """cache: [kv_heads, slots, head_size] → [rows, kv_heads, length, head_size]; no copy if the
    slots are contiguous
    """
    heads, _, size = cache.shape
    if isinstance(where, slice):
        return cache[None, :, where]
    blocks = cache.view(-1, block_tokens * size)  # [kv_heads * blocks, …]
    return blocks.index_select(0, where).view(rows, heads, -1, size)


def gather_values(
    k: Tensor, values: Tensor, where: Tensor | slice, block_tokens: int, rule: AttentionRule
) -> Tensor:
    """Return the values of gathered keys: k [rows, kv_heads, length, head_size] → the same, with
    the size of values.
    """
    if rule.value_size is not None:
        return k[..., : rule.value_size]
    return gather(values, where, len(k), block_tokens)


def _similar(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cut rows, longest first, into groups with bounded padding."""
    groups: list[np.ndarray] = []
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    while len(order):
        longest = lengths[order[0]]
        near = lengths[order] * _MAX_PADDING >= longest
        groups.append(np.sort(order[near]))
        order = order[~near]
    return groups


def _tokens(first: np.ndarray) -> Tensor | slice:
    """Return the indices of tokens in the step; a slice if they are contiguous."""
    if first[-1] - first[0] == len(first) - 1:
        return slice(int(first[0]), int(first[-1]) + 1)
    return torch.from_numpy(first)


def _where(
    tables: np.ndarray, lengths: np.ndarray, block_tokens: int, heads: int, cache_blocks: int
) -> tuple[Tensor | slice, int]:
    """Return what to gather for these rows, and the length they are padded to."""
    if len(tables) == 1 and (np.diff(tables[0]) == 1).all():
        start = int(tables[0, 0]) * block_tokens
        return slice(start, start + int(lengths[0])), int(lengths[0])
    by_head = tables[:, None, :].astype(np.int64) + (np.arange(heads) * cache_blocks)[None, :, None]
    return torch.from_numpy(by_head.reshape(-1)), tables.shape[1] * block_tokens


def _decode_mask(group: DecodeGroup, rule: AttentionRule, dtype: torch.dtype) -> Tensor | None:
    """Return [rows, 1, 1, length]: 0 where a row attends, -inf elsewhere; None if it attends to
    all.
    """
    lengths = group.lengths[:, None]
    whole = bool((lengths == group.first + group.length).all())
    unlimited = rule.window is None or rule.window >= group.length
    if whole and unlimited and (rule.chunk is None or int(lengths.max()) <= rule.chunk):
        return None
    position = torch.arange(group.first, group.first + group.length)[None, :]
    seen = position < lengths
    if rule.window is not None:
        seen &= (position >= lengths - rule.window) | (position < rule.sinks)
    if rule.chunk is not None:
        seen &= position >= (lengths - 1) // rule.chunk * rule.chunk
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None, :]


def tile_mask(
    first: int,
    last: int,
    oldest: int,
    rule: AttentionRule,
    dtype: torch.dtype,
    device: torch.device,
    end: int | None = None,
) -> Tensor:
    """Return [last - first, keys]: 0 where a query attends, -inf elsewhere. The keys are from
    `oldest` to `end`, or to the last query.
    """
    query = torch.arange(first, last, device=device)[:, None]
    position = torch.arange(oldest, end or last, device=device)[None, :]
    hidden = position > query
    if rule.window is not None:
        hidden |= (position <= query - rule.window) & (position >= rule.sinks)
    if rule.chunk is not None:
        hidden |= position < query // rule.chunk * rule.chunk
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
