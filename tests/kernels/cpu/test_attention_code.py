"""Compiled attention against torch's, over random block tables, windows, sinks and other rules."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cpu_steps import address, as_bf16, from_bf16, run

from slipstream.kernels.attention_rule import AttentionRule, Slopes
from slipstream.kernels.cpu.layout import CHUNK, PART_FLOATS, TILE_LANES
from slipstream.kernels.cpu.memory import aligned, aligned_rows
from slipstream.kernels.cpu.operations import Attention, Entry, Format, Merge

BLOCK = 24  # not a power of two
RULES = [
    AttentionRule(0.2),
    AttentionRule(0.2, window=37),
    AttentionRule(0.3, window=50, sinks=5),
    AttentionRule(0.3, softcap=2.0),
    AttentionRule(0.3, chunk=40),
    AttentionRule(0.3, window=30, sinks=5, chunk=64),
    AttentionRule(0.3, slopes=Slopes(tuple(2.0**-n for n in range(6)), scale=0.7)),
    AttentionRule(0.3, window=60, slopes=Slopes((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), rounded=True)),
    AttentionRule(0.3, sink_logits=(-3.0, 0.0, 1.0, 2.0, 5.0, 30.0)),
    AttentionRule(0.3, window=20, sink_logits=(-3.0, 0.0, 1.0, 2.0, 5.0, 30.0)),
]


def sees(rule, position, place):
    in_window = rule.window is None or place > position - rule.window or place < rule.sinks
    return in_window and (rule.chunk is None or place // rule.chunk == position // rule.chunk)


def rounded_slopes(slopes):
    by_head = torch.tensor(slopes.by_head, dtype=torch.float32)
    return by_head.bfloat16().double() if slopes.rounded else by_head.double()


def biases(rule, position, seen):
    """Return what is added to the scores of these positions: [heads, positions]."""
    if rule.slopes is None:
        return 0.0
    slopes = rounded_slopes(rule.slopes)[:, None]
    if rule.slopes.rounded:
        places = torch.tensor(seen, dtype=torch.float32)
        return (slopes.float() * places).bfloat16().double() * rule.slopes.scale
    return slopes * (torch.tensor(seen) - position) * rule.slopes.scale


@dataclass
class Row:
    """New tokens of a sequence, from `start` on."""

    start: int
    count: int


class Case:
    def __init__(self, rows, heads=6, kv_heads=2, size=32, kind=Format.F32, seed=0):
        chance = np.random.default_rng(seed)
        self.rows = rows
        self.heads = heads
        self.kv_heads = kv_heads
        self.size = size
        self.kind = kind
        longest = max(row.start + row.count for row in rows)
        width = -(-longest // BLOCK)
        blocks = 1 + len(rows) * width
        order = chance.permutation(np.arange(1, blocks))
        self.tables = order.reshape(len(rows), width).astype(np.int32)
        shape = (2, kv_heads, blocks * BLOCK, size)
        self.cache = self.rounded(chance.standard_normal(shape, dtype=np.float32))
        self.tokens = sum(row.count for row in rows)
        queries = chance.standard_normal((self.tokens, heads * size), dtype=np.float32)
        self.queries = self.rounded(queries)

    def rounded(self, numbers):
        return numbers if self.kind is Format.F32 else as_bf16(numbers)

    def exact(self, numbers):
        return torch.from_numpy(
            (numbers if self.kind is Format.F32 else from_bf16(numbers)).astype(np.float64)
        )

    def expected(self, rule):
        """Return the result for each token, computed one by one in float64."""
        found = []
        cache = self.exact(self.cache)
        queries = self.exact(self.queries).view(self.tokens, self.heads, self.size)
        token = 0
        for row, table in zip(self.rows, self.tables, strict=True):
            for position in range(row.start, row.start + row.count):
                seen = [place for place in range(position + 1) if sees(rule, position, place)]
                slots = [int(table[place // BLOCK]) * BLOCK + place % BLOCK for place in seen]
                keys, values = cache[:, :, slots].repeat_interleave(
                    self.heads // self.kv_heads, dim=1
                )
                scores = (keys @ queries[token, :, :, None])[..., 0] * rule.scale
                if rule.softcap:
                    scores = torch.tanh(scores / rule.softcap) * rule.softcap
                scores = scores + biases(rule, position, seen)
                logits = torch.tensor(rule.sink_logits or ()).view(-1, 1)
                beside = torch.cat((scores, logits), dim=-1) if len(logits) else scores
                weights = torch.softmax(beside, dim=-1)[:, : len(seen)]
                found.append((weights[..., None] * values).sum(dim=1).flatten())
                token += 1
        return torch.stack(found).numpy()

    def run(self, team, rule, tiled=False, split=False):
        target = aligned_rows(self.tokens, self.heads * self.size, np.float32)
        merged = aligned_rows(max(self.tokens, team.size), self.heads * self.size, np.float32)
        logits = None
        if rule.sink_logits is not None:
            logits = np.array(rule.sink_logits, dtype=np.float32)
        slopes = None
        if rule.slopes is not None:
            slopes = rounded_slopes(rule.slopes).numpy().astype(np.float32)
        item = self.cache.itemsize
        head_bytes = self.cache.shape[2] * self.size * item
        common = {
            "heads": self.heads,
            "head_size": self.size,
            "sink_logits": address(logits),
        }
        attention = Attention(
            queries=address(self.queries),
            query_stride=self.queries.strides[0],
            format=self.kind,
            keys=address(self.cache),
            values=address(self.cache) + self.kv_heads * head_bytes,
            head_stride=head_bytes,
            kv_heads=self.kv_heads,
            target=address(target),
            target_stride=target.strides[0],
            scale=rule.scale,
            softcap=rule.softcap,
            window=2**30 if rule.window is None else rule.window,
            sinks=rule.sinks,
            chunk=rule.chunk or 0,
            slopes=address(slopes),
            slope_scale=1.0 if rule.slopes is None else rule.slopes.scale,
            slopes_rounded=rule.slopes is not None and rule.slopes.rounded,
            **common,
        )
        merge = Merge(
            source=address(target),
            source_stride=target.strides[0],
            gather=0,
            target=address(merged),
            target_stride=merged.strides[0],
            target_own=merged.strides[0],
            format=Format.F32,
            width=self.heads * self.size,
            **common,
        )
        singles, tiles = self.work(tiled)
        longest = max((length for _, length, _ in singles), default=0)
        chunks = -(-longest // CHUNK) if split else 0
        parts = aligned(4 * self.tokens * chunks * self.heads * (self.size + PART_FLOATS) + 64)
        run(
            team,
            [Entry(attention), Entry(merge, alone=True)],
            self.tokens,
            singles=len(singles),
            single_list=np.array(singles, dtype=np.int64).reshape(-1, 3),
            tiles=len(tiles),
            tile_list=np.array(tiles, dtype=np.int64).reshape(-1, 4),
            split=chunks,
            parts=parts,
            block_tokens=BLOCK,
        )
        return merged[: self.tokens].copy()

    def work(self, tiled):
        singles = []
        tiles = []
        token = 0
        each = TILE_LANES // (self.heads // self.kv_heads)
        for row, table in zip(self.rows, self.tables, strict=True):
            for first in range(0, row.count, each if tiled else 1):
                count = min(each, row.count - first)
                position = row.start + first
                if tiled:
                    tiles.append((token + first, count, position, address(table)))
                else:
                    singles.append((token + first, position + 1, address(table)))
            token += row.count
        return singles, tiles


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("rule", RULES)
def test_single_tokens(team, rule, kind):
    case = Case([Row(0, 1), Row(300, 1), Row(17, 1), Row(255, 1), Row(600, 1)], kind=kind)
    tolerance = 2e-5 if kind is Format.F32 else 1e-4
    assert np.abs(case.run(team, rule) - case.expected(rule)).max() < tolerance


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("rule", RULES)
def test_tiles_of_prompts(team, rule, kind):
    case = Case([Row(0, 70), Row(250, 30), Row(520, 3)], kind=kind)
    tolerance = 2e-5 if kind is Format.F32 else 0.02  # weights are rounded to bfloat16
    assert np.abs(case.run(team, rule, tiled=True) - case.expected(rule)).max() < tolerance


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (8, 2), (71, 1)])
@pytest.mark.parametrize("size", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
def test_sizes_of_heads_and_groups(pair, heads, size, kind):
    case = Case([Row(40, 3), Row(0, 2)], *heads, size, kind)
    rule = RULES[0]
    tolerance = 2e-5 if kind is Format.F32 else 1e-4
    expected = case.expected(rule)
    assert np.abs(case.run(pair, rule) - expected).max() < tolerance
    if heads[0] <= TILE_LANES:
        assert np.abs(case.run(pair, rule, tiled=True) - expected).max() < 0.02


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("rule", RULES)
def test_divided_positions_give_the_same_bits(team, rule, kind):
    case = Case([Row(700, 1)], kind=kind)
    whole = case.run(team, rule)
    assert np.array_equal(case.run(team, rule, split=True), whole)


@pytest.mark.parametrize("kind", [Format.F32, Format.BF16])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(pair, kind, tiled):
    whole = Case([Row(0, 300)], kind=kind)
    expected = whole.run(pair, RULES[1], tiled)
    for begin, end in [(0, 100), (100, 101), (101, 290), (290, 300)]:
        part = Case([Row(begin, end - begin)], kind=kind)
        part.cache = whole.cache
        part.tables = whole.tables
        part.queries = whole.queries[begin:end]
        assert np.array_equal(part.run(pair, RULES[1], tiled), expected[begin:end])
