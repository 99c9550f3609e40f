"""Paged attention against the plain formula, on random mixes of rows at block edges."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.cache.window import Window
from slipstream.kernels import attention
from slipstream.kernels.attention import plan_attention
from slipstream.kernels.attention_rule import AttentionRule, Slopes, cache_shape

BLOCK = 4


def write(keys, values, k, v, slots):
    keys[:, slots], values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)


def reference(q, k, v, start, rule):
    """q: [n, heads, d]; k, v: [length, kv_heads, d], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    query = torch.arange(start, start + len(q))[:, None]
    position = torch.arange(len(k))[None, :]
    seen = position <= query
    if rule.window is not None:
        seen &= (position > query - rule.window) | (position < rule.sinks)
    if rule.chunk is not None:
        seen &= position // rule.chunk == query // rule.chunk
    if rule.slopes is not None:
        slopes = torch.tensor(rule.slopes.by_head, dtype=torch.float64)[:, None, None]
        biases = slopes * (position if rule.slopes.rounded else position - query)
        scores = scores + rule.slopes.scale * biases
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


# Each row: (tokens before this step, tokens in it); 1 is a decode, the edges of a block are 3, 4,
# 5.
counts = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9, 64, 65, 130])
rows = st.lists(st.tuples(st.integers(0, 40), counts), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    rows,
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 5, 8, 100]),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([0.0, 0.0, 2.5]),
    st.sampled_from([None, None, 1, 7, 32]),
    st.sampled_from([None, None, (1.0, False), (0.5, False), (0.5, True)]),
    st.booleans(),
    st.sampled_from([1, 10**9]),
    st.integers(0, 1000),
)
def test_paged_attention_equals_the_formula(
    mix, heads, window, sinks, softcap, chunk, biases, scattered, gemm_from, seed
):
    slopes = None
    if biases is not None:
        # powers of two times small positions are values of bfloat16
        slopes = Slopes(tuple(2.0**-head for head in range(heads[0])), biases[1], biases[0])
    rule = AttentionRule(0.3, window, sinks, softcap, chunk, slopes)
    with mock.patch.object(attention, "_GEMM_FROM_TOKENS", gemm_from):
        check_against_formula(mix, heads, rule, scattered, seed)


def check_against_formula(mix, heads, rule, scattered, seed):
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    lengths = [start + count for start, count in mix]
    blocks = [-(-length // BLOCK) for length in lengths]
    total = sum(blocks) + 1
    order = (
        torch.randperm(total - 1, generator=generator) + 1 if scattered else torch.arange(1, total)
    )
    tables = np.zeros((len(mix), max(blocks)), dtype=np.int32)
    taken = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[taken : taken + count].numpy()
        taken += count
    cache = torch.randn(cache_shape(1, total * BLOCK, kv_heads, 8), generator=generator)
    keys, values = cache[0]
    flat = [(row, p) for row, (start, count) in enumerate(mix) for p in range(start, start + count)]
    slots = torch.tensor([int(tables[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in flat])
    q = torch.randn(len(flat), q_heads, 8, generator=generator)
    k, v = (torch.randn(len(flat), kv_heads, 8, generator=generator) for _ in range(2))
    write(keys, values, k, v, slots)
    plan = plan_attention(
        tables, np.array([s for s, _ in mix]), np.array([c for _, c in mix]), BLOCK, cache
    )
    out = plan.attend(q, keys, values, rule)
    offset = 0
    for row, (start, count) in enumerate(mix):
        where = torch.tensor(
            [int(tables[row, p // BLOCK]) * BLOCK + p % BLOCK for p in range(start + count)]
        )
        expected = reference(
            q[offset : offset + count].double(),
            keys[:, where].double().transpose(0, 1),
            values[:, where].double().transpose(0, 1),
            start,
            rule,
        )
        assert torch.allclose(out[offset : offset + count].double(), expected, atol=1e-5)
        offset += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_reads_the_null_block_and_changes_nothing(dtype):
    """Rows of different lengths share a gather. Large numbers in the null block reach none of them."""
    torch.manual_seed(0)
    cache = torch.randn(cache_shape(1, 10 * BLOCK, 2, 8)).to(dtype)
    cache[..., :BLOCK, :] = 1e4
    keys, values = cache[0]
    tables = np.array([[1, 2, 3], [4, 5, 0]], dtype=np.int32)
    q, k, v = (
        torch.randn(2, 2, 8).to(dtype),
        torch.randn(2, 2, 8).to(dtype),
        torch.randn(2, 2, 8).to(dtype),
    )
    # row 0 at position 10, row 1 at position 5
    slots = torch.tensor([1 * BLOCK + 10, 4 * BLOCK + 5])
    write(keys, values, k, v, slots)
    plan = plan_attention(tables, np.array([10, 5]), np.array([1, 1]), BLOCK, cache)
    together = plan.attend(q, keys, values, AttentionRule(0.3))
    for row, position in enumerate((10, 5)):
        one = plan_attention(
            tables[row : row + 1], np.array([position]), np.array([1]), BLOCK, cache
        )
        alone = one.attend(q[row : row + 1], keys, values, AttentionRule(0.3))
        assert torch.allclose(
            alone[0].float(), together[row].float(), atol=1e-5 if dtype == torch.float32 else 2e-2
        )


@settings(max_examples=60, deadline=None)
@given(
    rows,
    st.sampled_from([1, 5, 8, 30]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_blocks_outside_the_window_are_not_read(mix, window, sinks, scattered, seed):
    """With the null block in their place and nan in the old blocks, the result is the same."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-(start + count) // BLOCK) for start, count in mix]
    order = (
        torch.randperm(sum(blocks), generator=generator) + 1
        if scattered
        else torch.arange(1, sum(blocks) + 1)
    )
    tables = np.zeros((len(mix), max(blocks)), dtype=np.int32)
    for row, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[row, :count] = order[end - count : end].numpy()
    cache = torch.randn(cache_shape(1, (sum(blocks) + 1) * BLOCK, 2, 8), generator=generator)
    cache[..., :BLOCK, :] = 0.0
    positions, counts = np.array([s for s, _ in mix]), np.array([c for _, c in mix])
    q = torch.randn(int(counts.sum()), 4, 8, generator=generator)
    rule = AttentionRule(0.3, window, sinks)
    expected = plan_attention(tables, positions, counts, BLOCK, cache).attend(q, *cache[0], rule)
    left = tables.copy()
    for row, (start, _) in enumerate(mix):
        for index in Window(window, sinks).blocks_outside(start, BLOCK):
            cache[..., tables[row, index] * BLOCK : (tables[row, index] + 1) * BLOCK, :] = math.nan
            left[row, index] = 0
    found = plan_attention(left, positions, counts, BLOCK, cache).attend(q, *cache[0], rule)
    assert torch.allclose(found, expected, atol=1e-6)
