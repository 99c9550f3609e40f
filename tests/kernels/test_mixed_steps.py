"""What a captured step is told: rows with one token first, then the tokens of others, then padding."""

import os
from collections import Counter

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

from slipstream.engine.gpu.mixed_graphs import MixedBuffers
from slipstream.kernels.gpu import decode_attention
from slipstream.kernels.gpu.decode_chunks import Places, cut_chunks, most_chunks, shared_chunks

PADDING = 99


def filled(rows, positions, counts, wanted):
    buffers = MixedBuffers(
        4, 16, kv_heads=2, places=Places(2), padding_row=PADDING, device=torch.device("cpu")
    )
    buffers.fill(
        *(np.array(column, dtype=np.int64) for column in (rows, positions, counts, wanted))
    )
    return buffers


def tables_and_lengths(buffers):
    """Of the rows with one token: how often the step has which."""
    return Counter((chunk[1], chunk[4]) for chunk in buffers.decode.chunks.tolist() if chunk[7])


def test_rows_with_one_token_come_first_and_padding_is_a_row_of_its_own():
    buffers = filled([3, 5, 7, 2], [10, 33, 0, 5], [1, 1, 7, 4], [0, 1, 8, 12])
    assert buffers.rows.tolist() == [3, 5] + [PADDING] * 2 + [7] * 7 + [2] * 4 + [PADDING] * 5
    assert buffers.positions.tolist() == [10, 33, 0, 0, *range(7), 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert buffers.wanted.tolist()[:4] == [0, 1, 10, 14], (
        "the last tokens of 7 and 2 lie behind the padding"
    )
    assert tables_and_lengths(buffers) == {(3, 11): 1, (5, 34): 1, (PADDING, 1): 2}
    tiles = zip(
        *(
            getattr(buffers.prefill, f"tile_{name}").tolist()[:3]
            for name in ("token", "position", "queries", "row", "prefix")
        ),
        strict=True,
    )
    assert sorted(tiles) == [(4, 0, 7, 7, 0), (11, 5, 4, 2, 5), (15, 0, 5, PADDING, 0)]
    assert not buffers.prefill.tile_queries[3:].any(), "tiles beyond have nothing to do"


def test_a_full_step_has_no_padding():
    buffers = filled([0, 1, 2, 3, 4], [1, 1, 1, 1, 0], [1, 1, 1, 1, 16], [19])
    assert PADDING not in buffers.rows.tolist()
    assert buffers.wanted.tolist()[0] == 19
    assert buffers.prefill.tile_queries.tolist()[:2] == [16, 0]


def test_a_step_filled_anew_keeps_nothing_of_the_one_before():
    buffers = filled([0, 1, 2, 3, 4], [1, 1, 1, 1, 0], [1, 1, 1, 1, 16], [19])
    buffers.fill(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
    assert set(buffers.rows.tolist()) == {PADDING}
    assert not buffers.positions.any()
    assert not buffers.wanted.any()
    assert tables_and_lengths(buffers) == {(PADDING, 1): 4}
    assert buffers.prefill.tile_queries.tolist()[:2] == [16, 0]
    assert buffers.prefill.tile_row.tolist()[0] == PADDING


@pytest.mark.parametrize("places", [Places(2), Places(660), Places(660, narrow=True)])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_chunks_cover_every_row_and_fit_their_room(places, kv_heads):
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
        chunks = cut_chunks(np.arange(len(lengths)) + 50, lengths, kv_heads, places)
        assert len(chunks) <= most_chunks(len(lengths), kv_heads, places)
        row, table, start, end, length, place = chunks.T[:6]
        assert sorted(place[chunks[:, 7] > 1]) == list(range((chunks[:, 7] > 1).sum())), (
            "room for rows that are cut"
        )
        room = shared_chunks(len(chunks) * kv_heads, len(lengths), kv_heads, places)
        assert (chunks[:, 7] > 1).sum() * kv_heads <= room <= 4 * places.count
        assert (table == row + 50).all()
        assert (length == lengths[row]).all()
        assert (end - start).tolist() == sorted(end - start, reverse=True), "the longest first"
        for index, tokens in enumerate(lengths):
            mine = chunks[row == index][np.argsort(place[row == index])]
            assert (mine[0, 2], mine[-1, 3]) == (0, tokens)
            assert (mine[1:, 2] == mine[:-1, 3]).all(), "one after the other, to the end of the row"
            assert (mine[:, 5] - mine[:, 6]).tolist() == list(range(len(mine)))
            assert (mine[:, 7] == len(mine)).all()


def test_rows_are_cut_only_where_whole_ones_would_leave_the_machine_idle():
    many = cut_chunks(np.zeros(256, dtype=np.int64), np.full(256, 1500), 8, Places(660))
    assert (many[:, 7] == 1).all(), "2,048 programs are plenty for 660 places"
    few = cut_chunks(np.zeros(32, dtype=np.int64), np.full(32, 2000), 8, Places(660))
    assert (few[:, 7] == 2).all(), "256 are not, so each row is cut in two"


def test_rows_of_narrow_programs_are_cut_finer_where_there_are_many():
    lengths, places = np.array([1800] * 20 + [300] * 80), Places(660, narrow=True)
    plain, fine = (
        cut_chunks(np.zeros(100, dtype=np.int64), lengths, 8, p) for p in (Places(660), places)
    )
    assert (plain[:, 7] == np.where(plain[:, 4] == 1800, 2, 1)).all()
    assert (fine[:, 7] == np.where(fine[:, 4] == 1800, 4, 1)).all(), (
        "60,000 tokens by eight heads, shared by 924"
    )
    plain, few = (
        cut_chunks(np.zeros(30, dtype=np.int64), lengths[:30], 8, p) for p in (Places(660), places)
    )
    assert np.array_equal(few, plain)


@pytest.mark.parametrize(("rows", "parts"), [(40, 3), (39, 2)])
def test_half_of_the_places_are_many(rows, parts):
    chunks = cut_chunks(
        np.zeros(rows, dtype=np.int64), np.full(rows, 2000), 8, Places(640, narrow=True)
    )
    assert (chunks[:, 7] == parts).all()


@pytest.mark.parametrize(("length", "parts"), [(1152, 1), (1153, 2)])
def test_a_share_of_many_narrow_programs_is_that_of_seven_a_processor(length, parts):
    lengths = np.array([length] + [1000] * 127)  # 1,024,000 tokens by head, 1,108 for each of 924
    assert (
        cut_chunks(np.zeros(128, dtype=np.int64), lengths, 8, Places(660, narrow=True))[:, 7].max()
        == parts
    )


def test_room_for_many_narrow_rows_that_are_all_cut():
    places = Places(660, narrow=True)
    chunks = cut_chunks(np.zeros(64, dtype=np.int64), np.full(64, 1000), 8, places)
    assert (chunks[:, 7] == 2).all()
    assert shared_chunks(len(chunks) * 8, 64, 8, places) == 64 * 2 * 8


@pytest.mark.parametrize(
    ("load", "narrow", "warps"), [(0.39, True, 2), (0.4, True, 1), (3.0, True, 1), (3.0, False, 4)]
)
def test_programs_over_packed_tokens_are_narrow_where_there_are_many(load, narrow, warps):
    assert decode_attention._packed_tuning(load, narrow)["num_warps"] == warps
