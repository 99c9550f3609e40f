"""The inputs of a captured mixed step: decode rows first, then the tokens of prompts, then padding."""

import os
from collections import Counter

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

from slipstream.engine.gpu.mixed_graphs import (
    SIZES,
    MixedBuffers,
    MixedGraphs,
    MixedSize,
    sizes_to_capture,
)
from slipstream.kernels.gpu import decode_attention
from slipstream.kernels.gpu.decode_chunks import (
    Chunk,
    ResidentCtas,
    cut_chunks,
    max_chunks,
    max_shared_chunks,
)

PADDING = 99


def filled(rows, positions, counts, wanted):
    buffers = MixedBuffers(
        MixedSize(4, 16),
        kv_heads=2,
        resident_ctas=ResidentCtas(2),
        padding_row=PADDING,
        device=torch.device("cpu"),
    )
    buffers.fill(
        *(np.array(column, dtype=np.int64) for column in (rows, positions, counts, wanted))
    )
    return buffers


def tables_and_lengths(buffers):
    """Count the (table row, length) of the decode rows."""
    chunks = [Chunk(*fields) for fields in buffers.decode.chunks.tolist()]
    return Counter((chunk.table_row, chunk.length) for chunk in chunks if chunk.parts)


def test_decode_rows_come_first_and_padding_is_its_own_row():
    buffers = filled([3, 5, 7, 2], [10, 33, 0, 5], [1, 1, 7, 4], [0, 1, 8, 12])
    assert buffers.rows.tolist() == [3, 5] + [PADDING] * 2 + [7] * 7 + [2] * 4 + [PADDING] * 5
    assert buffers.positions.tolist() == [10, 33, 0, 0, *range(7), 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert buffers.logit_tokens.tolist()[:4] == [0, 1, 10, 14], (
        "the last tokens of rows 7 and 2 come after the padding"
    )
    assert tables_and_lengths(buffers) == {(3, 11): 1, (5, 34): 1, (PADDING, 1): 2}
    tiles = zip(
        *(
            getattr(buffers.prefill, f"tile_{name}").tolist()[:3]
            for name in ("token", "position", "queries", "row", "cached")
        ),
        strict=True,
    )
    assert sorted(tiles) == [(4, 0, 7, 7, 0), (11, 5, 4, 2, 5), (15, 0, 5, PADDING, 0)]
    assert not buffers.prefill.tile_queries[3:].any(), "further tiles are empty"


def test_a_full_step_has_no_padding():
    buffers = filled([0, 1, 2, 3, 4], [1, 1, 1, 1, 0], [1, 1, 1, 1, 16], [19])
    assert PADDING not in buffers.rows.tolist()
    assert buffers.logit_tokens.tolist()[0] == 19
    assert buffers.prefill.tile_queries.tolist()[:2] == [16, 0]


def test_refilling_a_step_clears_the_previous_one():
    buffers = filled([0, 1, 2, 3, 4], [1, 1, 1, 1, 0], [1, 1, 1, 1, 16], [19])
    buffers.fill(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
    assert set(buffers.rows.tolist()) == {PADDING}
    assert not buffers.positions.any()
    assert not buffers.logit_tokens.any()
    assert tables_and_lengths(buffers) == {(PADDING, 1): 4}
    assert buffers.prefill.tile_queries.tolist()[:2] == [16, 0]
    assert buffers.prefill.tile_row.tolist()[0] == PADDING


@pytest.mark.parametrize(
    "resident_ctas", [ResidentCtas(2), ResidentCtas(660), ResidentCtas(660, one_warp=True)]
)
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_chunks_cover_every_row_and_fit_their_memory(resident_ctas, kv_heads):
    chance = np.random.default_rng(0)
    for lengths in (
        [],
        [1],
        [100_000],
        [64] * 40,
        [1, 5000, 3],
        [20_000] * 10 + [1] * 32,
        chance.integers(1, 3000, 300),
    ):
        lengths = np.array(lengths, dtype=np.int64)
        chunks = cut_chunks(np.arange(len(lengths)) + 50, lengths, kv_heads, resident_ctas)
        assert len(chunks) <= max_chunks(len(lengths), kv_heads, resident_ctas)
        fields = Chunk(*chunks.T)
        cut = fields.parts > 1
        assert sorted(fields.part[cut]) == list(range(cut.sum())), "room for rows that are cut"
        room = max_shared_chunks(len(chunks) * kv_heads, len(lengths), kv_heads, resident_ctas)
        assert cut.sum() * kv_heads <= room <= 4 * resident_ctas.count
        assert (fields.table_row == fields.row + 50).all()
        assert (fields.length == lengths[fields.row]).all()
        sizes = (fields.end - fields.start).tolist()
        assert sizes == sorted(sizes, reverse=True), "the longest first"
        for index, tokens in enumerate(lengths):
            of_row = chunks[fields.row == index]
            mine = Chunk(*of_row[np.argsort(fields.part[fields.row == index])].T)
            count = len(of_row)
            assert (mine.start[0], mine.end[-1]) == (0, tokens)
            assert (mine.start[1:] == mine.end[:-1]).all(), "one after the other, to the row's end"
            assert (mine.part - mine.first_part).tolist() == list(range(count))
            assert (mine.parts == count).all()


def test_rows_are_cut_only_where_whole_ones_would_leave_sms_idle():
    many = cut_chunks(np.zeros(256, dtype=np.int64), np.full(256, 1500), 8, ResidentCtas(660))
    assert (Chunk(*many.T).parts == 1).all(), "2,048 CTAs are plenty for 660 resident ones"
    few = cut_chunks(np.zeros(32, dtype=np.int64), np.full(32, 2000), 8, ResidentCtas(660))
    assert (Chunk(*few.T).parts == 2).all(), "256 are not, so each row is cut in two"


def test_many_rows_of_one_warp_ctas_are_cut_finer():
    lengths, resident_ctas = np.array([1800] * 20 + [300] * 80), ResidentCtas(660, one_warp=True)
    plain, fine = (
        cut_chunks(np.zeros(100, dtype=np.int64), lengths, 8, p)
        for p in (ResidentCtas(660), resident_ctas)
    )
    assert (Chunk(*plain.T).parts == np.where(Chunk(*plain.T).length == 1800, 2, 1)).all()
    assert (Chunk(*fine.T).parts == np.where(Chunk(*fine.T).length == 1800, 4, 1)).all(), (
        "60,000 tokens by eight heads, shared by 924"
    )
    plain, few = (
        cut_chunks(np.zeros(30, dtype=np.int64), lengths[:30], 8, p)
        for p in (ResidentCtas(660), resident_ctas)
    )
    assert np.array_equal(few, plain)


@pytest.mark.parametrize(("rows", "parts"), [(40, 3), (39, 2)])
def test_half_of_the_resident_ctas_are_many(rows, parts):
    chunks = cut_chunks(
        np.zeros(rows, dtype=np.int64), np.full(rows, 2000), 8, ResidentCtas(640, one_warp=True)
    )
    assert (Chunk(*chunks.T).parts == parts).all()


@pytest.mark.parametrize(("length", "parts"), [(1152, 1), (1153, 2)])
def test_one_warp_shares_assume_seven_ctas_per_sm(length, parts):
    lengths = np.array([length] + [1000] * 127)  # 1,024,000 tokens by head, 1,108 for each of 924
    resident_ctas = ResidentCtas(660, one_warp=True)
    chunks = cut_chunks(np.zeros(128, dtype=np.int64), lengths, 8, resident_ctas)
    assert Chunk(*chunks.T).parts.max() == parts


def test_room_for_many_one_warp_rows_that_are_all_cut():
    resident_ctas = ResidentCtas(660, one_warp=True)
    chunks = cut_chunks(np.zeros(64, dtype=np.int64), np.full(64, 1000), 8, resident_ctas)
    assert (Chunk(*chunks.T).parts == 2).all()
    assert max_shared_chunks(len(chunks) * 8, 64, 8, resident_ctas) == 64 * 2 * 8


@pytest.mark.parametrize(
    ("load", "one_warp", "warps"),
    [(0.39, True, 2), (0.4, True, 1), (3.0, True, 1), (3.0, False, 4)],
)
def test_packed_decode_uses_one_warp_under_load(load, one_warp, warps):
    assert decode_attention._packed_tuning(load, one_warp)["num_warps"] == warps


def test_large_steps_are_captured_only_for_fast_models():
    assert sizes_to_capture(0, 8192, 1024) == SIZES
    some = [*SIZES, MixedSize(128, 1024, 32), MixedSize(512, 512, 32)]
    assert sizes_to_capture(1152, 8192, 1024) == some
    assert max(size.total for size in sizes_to_capture(10_000, 8192, 1024)) == 8704
    assert max(size.total for size in sizes_to_capture(10_000, 8192, 256)) == 8320
    assert max(size.total for size in sizes_to_capture(10_000, 4096, 1024)) == 5120


@pytest.mark.parametrize(
    ("decodes", "prompts", "logits", "fast", "expected"),
    [
        (0, [64], 1, 640, (16, 64)),
        (17, [30, 30], 19, 640, (128, 64)),
        (16, [30] * 17, 33, 640, None),  # too many prompts
        (0, [300], 33, 640, (128, 512)),  # logits of more tokens than 16 rows and 16 prompts have
        (0, [600], 1, 640, None),  # too many tokens
        (129, [64], 130, 640, None),  # too many streams
        (16, [64], 17, 0, (16, 64)),  # nothing is padded
        (64, [448], 65, 390, None),  # 128 tokens of padding take too long
        (64, [448], 65, 640, (128, 512)),  # the launch takes longer than the padded step
        (120, [500], 121, 390, (128, 512)),  # 20 tokens of padding
        (20, [64], 21, 0, (128, 64)),  # reading the weights takes longer than the padding
    ],
)
def test_a_step_takes_the_smallest_captured_size(decodes, prompts, logits, fast, expected):
    graphs = MixedGraphs.__new__(MixedGraphs)
    graphs._graphs = dict.fromkeys(SIZES)
    graphs.fast_tokens = fast
    found = graphs.captured_size(np.array([1] * decodes + prompts), logits)
    assert (None if found is None else found[:2]) == expected
