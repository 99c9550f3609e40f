"""The arrays of a GPU step: each field has its place in one piece of memory."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels below are defined

pytest.importorskip(
    "triton", reason="the kernels need Triton, which a CPU installation of torch does not bring"
)

from slipstream.engine.gpu.step_arrays import (
    EMPTY,
    StaticStepArrays,
    StepArrays,
    aligned,
    decode_plan,
    pack,
    prefill_plan,
    to_device_arrays,
)
from slipstream.kernels.gpu.decode_chunks import CHUNK_FIELDS

CPU = torch.device("cpu")
FIELDS = StepArrays._fields


def arrays_of_sizes(*sizes):
    """Return arrays that each hold their own field's index."""
    return StepArrays._make(np.full(size, index) for index, size in enumerate(sizes))


def test_every_array_keeps_its_field_on_the_device():
    values = arrays_of_sizes(5, 5, 0, 3, 2 * CHUNK_FIELDS, 1, 2, 3, 4, 5)
    found = to_device_arrays(values, CPU)
    for field, array, expected in zip(FIELDS, found, values, strict=True):
        assert array.tolist() == expected.tolist(), field
        assert array.dtype == torch.int32


def test_arrays_begin_at_multiples_of_16_bytes():
    assert [aligned(count) for count in (0, 1, 4, 5)] == [0, 4, 4, 8]
    packed = pack([np.arange(5), np.arange(3), np.arange(1)], CPU)
    first = packed[0].data_ptr()
    assert [(array.data_ptr() - first) % 16 for array in packed] == [0, 0, 0]


def test_static_arrays_are_filled_by_field_and_padded_with_zeros():
    sizes = StepArrays(8, 8, 0, 4, CHUNK_FIELDS, 2, 2, 2, 2, 2)
    static = StaticStepArrays(sizes, CPU)
    addresses = [array.data_ptr() for array in static.arrays]
    static.fill(arrays_of_sizes(8, 8, 0, 4, CHUNK_FIELDS, 2, 2, 2, 2, 2))
    static.fill(
        StepArrays(
            rows=np.array([7, 9]),
            positions=np.array([3, 4]),
            lengths=EMPTY,
            logit_tokens=np.array([1]),
            chunks=np.arange(CHUNK_FIELDS),
            tile_token=np.array([10]),
            tile_position=np.array([11]),
            tile_queries=np.array([12]),
            tile_row=np.array([13]),
            tile_cached=np.array([14]),
        )
    )
    arrays = static.arrays
    assert arrays.rows.tolist() == [7, 9, 0, 0, 0, 0, 0, 0]
    assert arrays.positions.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert arrays.lengths.tolist() == []
    assert arrays.logit_tokens.tolist() == [1, 0, 0, 0]
    assert decode_plan(arrays).chunks.tolist() == [list(range(CHUNK_FIELDS))]
    plan = prefill_plan(arrays, large_tiles=True)
    assert plan.large_tiles
    assert plan.tile_token.tolist() == [10, 0]
    assert plan.tile_position.tolist() == [11, 0]
    assert plan.tile_queries.tolist() == [12, 0]
    assert plan.tile_row.tolist() == [13, 0]
    assert plan.tile_cached.tolist() == [14, 0]
    assert [array.data_ptr() for array in arrays] == addresses, "a graph reads these addresses"


def test_an_array_larger_than_its_space_is_an_error():
    static = StaticStepArrays(StepArrays(2, 2, 0, 0, 0, 0, 0, 0, 0, 0), CPU)
    with pytest.raises(AssertionError, match="3 values for an array of 2"):
        static.fill(arrays_of_sizes(3, 2, 0, 0, 0, 0, 0, 0, 0, 0))
