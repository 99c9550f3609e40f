"""The block formats of GGUF files, compared with the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from slipstream.kernels.block_sizes import BLOCK_SIZES
from slipstream.kernels.blocks import BLOCK_FORMATS, matrix_of


def random_rows(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random bytes that are rows of a format. All of them are valid; some are NaN."""
    size = BLOCK_SIZES[name].row_bytes(columns)
    return np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_values_are_those_of_the_gguf_package(name):
    raw = random_rows(name, 67, 768)
    with np.errstate(all="ignore"):  # random scales overflow
        expected = gguf.quants.dequantize(raw, Kind[name])
        found = BLOCK_FORMATS[name].expand(raw)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert (found.view(np.uint32) == expected.view(np.uint32))[~np.isnan(expected)].all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_levels_times_scales_plus_offsets_are_the_values(name):
    one = BLOCK_FORMATS[name]
    raw = random_rows(name, 3, 512) % 60  # small bytes: finite scales
    levels = one.read_levels(raw)
    groups = 512 // one.weights * one.groups
    assert levels.numbers.dtype == np.int8
    assert levels.numbers.shape == (3, 512)
    assert levels.scales.shape == (3, groups)
    values = levels.numbers.reshape(3, groups, -1) * levels.scales[..., None]
    if levels.offsets is not None:
        assert levels.offsets.shape == (3, groups)
        values += levels.offsets[..., None]
    assert (values.reshape(3, 512) == one.expand(raw)).all()


def test_sizes_are_those_of_the_gguf_package():
    for name in BLOCK_FORMATS:
        assert tuple(BLOCK_SIZES[name]) == gguf.GGML_QUANT_SIZES[Kind[name]]
    with pytest.raises(ValueError, match="300 columns are not whole blocks of 256 weights"):
        BLOCK_SIZES["Q4_K"].row_bytes(300)


def test_a_matrix_has_parts_of_different_formats():
    parts = [("Q4_K", random_rows("Q4_K", 5, 512) % 60), ("Q8_0", random_rows("Q8_0", 3, 512) % 60)]
    matrix = matrix_of(parts)
    whole = np.concatenate([BLOCK_FORMATS[name].expand(raw) for name, raw in parts])
    assert matrix.shape == (8, 512)
    assert matrix.nbytes == 5 * 288 + 3 * 544
    assert (np.concatenate(list(matrix.expand(most_bytes=1))) == whole).all()
    taken = matrix.take([(6, 8), (0, 1), (3, 6)])
    assert (np.concatenate(list(taken.expand())) == whole[[6, 7, 0, 3, 4, 5]]).all()
    with pytest.raises(ValueError, match=r"parts of a matrix have \[256, 512\] columns"):
        matrix_of([parts[0], ("Q8_0", random_rows("Q8_0", 1, 256))])
