"""Quantised matrices of checkpoints in the block formats of GGUF files, which engines can keep.

A block holds 32 columns. A group of 32, 64 or 128 columns becomes blocks with the same scale:

    Q4_0  weight = scale * (number - 8)         2 or 4 bits, symmetric
    Q4_1  weight = scale * number + offset      2 or 4 bits; offset = -scale * zero point
    Q8_0  weight = scale * number               8 bits, symmetric

8-bit floats with a scale for each row, or for more of them, keep their bits as rows of `E4M3_FORM`.
Numbers and 16-bit float scales are exact. Scales in float32 and offsets are rounded to 11 bits.
Needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.weights.parameters import E4M3_FORM
from slipstream.weights.sources.quantised.integers import IntegerLayout
from slipstream.weights.sources.quantised.layer import QuantisedLayer
from slipstream.weights.sources.quantised.scaled import scale_tile, scales_of

_BLOCK = 32  # columns
_CENTRE = 8  # of Q4_0
_ROUNDING = 2.0**-11  # of a float16 that is not too small


class Kept(NamedTuple):
    """A matrix with neighbouring columns in groups."""

    form: str  # a name of BLOCK_SIZES
    numbers: np.ndarray  # [out, in]: uint8, or int8 of Q8_0
    scales: np.ndarray  # float32 [out, in / 32]
    offsets: np.ndarray | None  # the same of Q4_1


def integer_form(layer: QuantisedLayer, layout: IntegerLayout) -> str | None:
    """Return the form that keeps a matrix of integers; None: none does."""
    bits = layout.bits(layer)
    _, columns = layout.shape(layer)
    group = layout.groups(layer)
    blocks = group.reshape(-1, _BLOCK) if columns % _BLOCK == 0 else None
    if blocks is None or (blocks != blocks[:, :1]).any():
        return None
    zeros = layout.zeros(layer)
    symmetric = bool((zeros.numbers == zeros.centre).all())
    if bits == 8 and not symmetric:
        return None
    scales = layout.scales(layer)
    if not _fits_float16(scales):
        return None
    if not symmetric and not np.isfinite((scales * zeros.numbers).astype(np.float16)).all():
        return None
    if bits == 8:
        return "Q8_0"
    return "Q4_0" if symmetric else "Q4_1"


def scaled_form(layer: QuantisedLayer) -> str | None:
    """Return the form that keeps a matrix of 8-bit numbers with scales; None: none does."""
    rows, columns = layer.matrix("weight")
    if layer.has("weight_zero_point"):
        return None
    _, wide = scale_tile(layer, (rows, columns))
    if layer.slot("weight").dtype == E4M3_FORM:
        return E4M3_FORM if wide >= columns else None
    if columns % _BLOCK or (wide % _BLOCK and wide < columns) or layer.has("weight_g_idx"):
        return None
    return "Q8_0" if _fits_float16(scales_of(layer)) else None


def integer_blocks(layer: QuantisedLayer, layout: IntegerLayout, form: str) -> np.ndarray:
    """Return the rows of a matrix of integers in blocks, uint8 [out, row bytes]."""
    found = layout.read(layer)
    first = found.group[::_BLOCK]  # the group of each block
    scales = found.scales[:, first]
    zeros = found.zeros[:, first]
    centre = layout.zeros(layer).centre
    if form == "Q8_0":
        numbers = (found.numbers ^ np.uint8(centre)).view(np.int8)
        return byte_blocks(Kept(form, numbers, scales, None))
    if form == "Q4_0":
        return nibble_blocks(Kept(form, found.numbers + np.uint8(_CENTRE - centre), scales, None))
    return nibble_blocks(Kept(form, found.numbers, scales, -scales * zeros))


def scaled_blocks(layer: QuantisedLayer) -> np.ndarray:
    """Return the rows of a matrix of 8-bit numbers in blocks, uint8 [out, row bytes]."""
    rows, columns = layer.matrix("weight")
    tall, wide = scale_tile(layer, (rows, columns))
    grid = scales_of(layer)
    row = np.arange(rows) // tall
    block = np.arange(0, columns, _BLOCK) // wide
    numbers = np.ascontiguousarray(layer.array("weight").array)
    return byte_blocks(Kept("Q8_0", numbers, grid[row[:, None], block[None]], None))


def e4m3_rows(layer: QuantisedLayer) -> np.ndarray:
    """Return the rows of a matrix of 8-bit floats, each followed by its float32 scale:
    uint8 [out, in + 4].
    """
    rows, columns = layer.matrix("weight")
    tall, _ = scale_tile(layer, (rows, columns))
    scales = np.repeat(scales_of(layer)[:, :1], tall, axis=0)[:rows].astype("<f4")
    return np.concatenate((layer.array("weight").array, scales.view(np.uint8)), axis=1)


def _fits_float16(scales: np.ndarray) -> bool:
    """Return whether rounding to float16 changes no scale by more than its last bit."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16).astype(np.float32)
    return bool((np.abs(halves - scales) <= _ROUNDING * np.abs(scales)).all())


def byte_blocks(kept: Kept) -> np.ndarray:
    blocks = kept.numbers.reshape(len(kept.numbers), -1, _BLOCK).view(np.uint8)
    return _rows(_halves(kept.scales), blocks)


def nibble_blocks(kept: Kept) -> np.ndarray:
    """Column i of a block is the low half of byte i, column i + 16 the high half."""
    blocks = kept.numbers.reshape(len(kept.numbers), -1, 2, _BLOCK // 2)
    data = blocks[:, :, 0] | (blocks[:, :, 1] << 4)
    if kept.offsets is None:
        return _rows(_halves(kept.scales), data)
    return _rows(_halves(kept.scales), _halves(kept.offsets), data)


def _halves(values: np.ndarray) -> np.ndarray:
    """Return the bytes of float16, uint8 [rows, blocks, 2]."""
    return np.ascontiguousarray(values.astype("<f2"))[..., None].view(np.uint8)


def _rows(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=2).reshape(len(parts[0]), -1)
