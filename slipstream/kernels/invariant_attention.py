"""Batch-invariant attention on a CPU: the result for a token depends on the tokens before it in its
sequence, and on nothing else in the step. Switch: `KernelOptions.deterministic`.

A matrix library chooses its kernel by the shape of a call, and kernels add in different orders. So
no call has a shape that depends on other requests. Queries are taken in fixed tiles of positions,
with the keys from position 0 to the end of the tile, whether a token comes with its whole prompt,
in a chunk of it or alone. On a GPU: gpu/invariant_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.attention import (
    gather,
    gather_values,
    position_bias,
    sink_logits,
    softcap,
    softmax,
    tile_mask,
)
from slipstream.kernels.attention_rule import AttentionRule

_TILE_TOKENS = 16  # positions of a tile of queries


@dataclass(slots=True)
class QueryTile:
    """Some queries of one row, all between two multiples of `_TILE_TOKENS`."""

    tokens: slice  # of the step
    begin: int  # position of the tile: a multiple of `_TILE_TOKENS`
    offset: int  # place of the first query in the tile
    where: Tensor  # [kv_heads * blocks] blocks to gather: all up to the end of the tile
    masks: dict[AttentionRule, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class InvariantAttentionPlan:
    block_tokens: int
    tiles: list[QueryTile]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Return [tokens, heads, head_size]; arguments as of `AttentionPlan.attend`."""
        size = values.shape[-1] if rule.value_size is None else rule.value_size
        output = queries.new_empty((*queries.shape[:2], size))
        for tile in self.tiles:
            k = gather(keys, tile.where, 1, self.block_tokens)
            v = gather_values(k, values, tile.where, self.block_tokens, rule)
            output[tile.tokens] = _attend(queries[tile.tokens], k[0], v[0], tile, rule)
        return output


def plan_attention(
    tables: np.ndarray,  # [rows of the step, blocks]
    positions: np.ndarray,  # [rows of the step]: first position each computes
    counts: np.ndarray,  # [rows of the step]: tokens each computes
    block_tokens: int,
    cache: Tensor,  # of `cache_shape`
) -> InvariantAttentionPlan:
    """Plan a step: cut the new tokens of each row at multiples of `_TILE_TOKENS`."""
    heads = cache.shape[2]
    head_blocks = np.arange(heads)[:, None] * (cache.shape[3] // block_tokens)
    offset_of_row = np.cumsum(counts) - counts
    tiles = []
    for table, position, count, offset in zip(
        tables, positions.tolist(), counts.tolist(), offset_of_row.tolist(), strict=True
    ):
        end = position + count
        for begin in range(position // _TILE_TOKENS * _TILE_TOKENS, end, _TILE_TOKENS):
            first = max(begin, position)
            last = min(begin + _TILE_TOKENS, end)
            tokens = slice(offset + first - position, offset + last - position)
            own = _blocks(table, begin + _TILE_TOKENS, end, block_tokens)
            where = torch.from_numpy((own[None, :] + head_blocks).reshape(-1))
            tiles.append(QueryTile(tokens, begin, first - begin, where))
    return InvariantAttentionPlan(block_tokens, tiles)


def _blocks(table: np.ndarray, length: int, used: int, block_tokens: int) -> np.ndarray:
    """Return the blocks of a row's first `length` tokens. Behind its `used` tokens they are masked,
    but must be finite: the null block instead of others.
    """
    blocks = np.zeros(-(-length // block_tokens), dtype=np.int64)
    held = min(len(blocks), -(-used // block_tokens))
    blocks[:held] = table[:held]
    return blocks


def _attend(q: Tensor, k: Tensor, v: Tensor, tile: QueryTile, rule: AttentionRule) -> Tensor:
    """q: [queries, heads, head_size]; k, v: [kv_heads, length, size] → as q, with the size of v"""
    count, heads, size = q.shape
    group = heads // len(k)
    whole = q.new_zeros((_TILE_TOKENS, heads, size))
    whole[tile.offset : tile.offset + count] = q * rule.scale
    by_kv_head = whole.view(_TILE_TOKENS, len(k), group, size).transpose(0, 1)
    queries = by_kv_head.reshape(len(k), -1, size)
    if rule not in tile.masks:
        end = tile.begin + _TILE_TOKENS
        tile.masks[rule] = tile_mask(tile.begin, end, 0, rule, q.dtype, q.device, k.shape[1])
    scores = softcap(torch.bmm(queries, k.transpose(1, 2)), rule)
    scores = scores.view(len(k), _TILE_TOKENS, group, -1)
    if rule.slopes is not None:
        bias = position_bias(rule.slopes, 0, k.shape[1])
        scores = scores + bias.view(len(k), 1, group, -1)
    scores += tile.masks[rule][:, None, :]
    weights = softmax(scores, sink_logits(rule, scores, (len(k), 1, group, 1)))
    weights = weights.view(len(k), -1, k.shape[1]).to(v.dtype)
    result = torch.bmm(weights, v).view(len(k), _TILE_TOKENS, group, v.shape[-1])
    kept = result[:, tile.offset : tile.offset + count]
    return kept.transpose(0, 1).reshape(count, heads, v.shape[-1])
