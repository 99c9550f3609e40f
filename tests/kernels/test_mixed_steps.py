"""What a captured step is told: rows with one token first, then the tokens of others, then padding."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

from slipstream.engine.mixed_graphs import MixedBuffers
from slipstream.kernels.gpu.decode_attention import cut_chunks, most_chunks

PADDING = 99


def filled(rows, positions, counts, wanted):
    buffers = MixedBuffers(4, 16, kv_heads=2, processors=2, padding_row=PADDING, device=torch.device("cpu"))
    buffers.fill(*(np.array(column, dtype=np.int64) for column in (rows, positions, counts, wanted)))
    return buffers


def test_rows_with_one_token_come_first_and_padding_is_a_row_of_its_own():
    buffers = filled([3, 5, 7, 2], [10, 33, 0, 5], [1, 1, 7, 4], [0, 1, 8, 12])
    assert buffers.rows.tolist() == [3, 5] + [PADDING] * 2 + [7] * 7 + [2] * 4 + [PADDING] * 5
    assert buffers.positions.tolist() == [10, 33, 0, 0, *range(7), 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert buffers.wanted.tolist()[:4] == [0, 1, 10, 14], "the last tokens of 7 and 2 lie behind the padding"
    assert buffers.decode.rows.tolist() == [3, 5, PADDING, PADDING]
    assert buffers.decode.lengths.tolist() == [11, 34, 1, 1]
    tiles = zip(*(getattr(buffers.prefill, f"tile_{name}").tolist()[:3]
                  for name in ("token", "position", "queries", "row", "prefix")), strict=True)
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
    assert buffers.decode.lengths.tolist() == [1] * 4
    assert buffers.prefill.tile_queries.tolist()[:2] == [16, 0]
    assert buffers.prefill.tile_row.tolist()[0] == PADDING


@pytest.mark.parametrize("processors", [2, 132])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_chunks_cover_every_row_and_fit_their_room(processors, kv_heads):
    chance = np.random.default_rng(0)
    for lengths in ([], [1], [100_000], [64] * 40, [1, 5000, 3], chance.integers(1, 3000, 300)):
        lengths = np.array(lengths, dtype=np.int64)
        first, row, start, size = cut_chunks(lengths, kv_heads, processors)
        assert len(row) <= most_chunks(len(lengths), kv_heads, processors)
        for index, length in enumerate(lengths):
            mine = start[first[index] : first[index + 1]]
            assert (row[first[index] : first[index + 1]] == index).all()
            assert mine.tolist() == list(range(0, length, size)), "one after the other, to the end of the row"
