"""Matrices of 8-bit numbers with a scale for the whole matrix, each row, group or block.

`P.weight` [out, in] is int8 or e4m3. The scales are `P.weight_scale`, `P.weight_scale_inv` (HF's
fp8: despite its name it is a factor) or `P.SCB` (bitsandbytes, the largest value of each row).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.kernels.stored import to_float32
from slipstream.weights.parameters import Shape
from slipstream.weights.sources.quantised.layer import QuantisedLayer
from slipstream.weights.sources.quantised.settings import Scheme

if TYPE_CHECKING:
    import torch

_LARGEST_INT8 = 127.0


def scaled_shape(layer: QuantisedLayer) -> tuple[int, int]:
    """Return the shape of the matrix. Raises SourceError if its scales do not fit it."""
    shape = layer.matrix("weight")
    scale_tile(layer, shape)
    return shape


def read_scaled(layer: QuantisedLayer) -> torch.Tensor:
    """Return the matrix, float32 [out, in]."""
    weight = layer.tensor("weight").float()
    shape = (weight.shape[0], weight.shape[1])
    tile = scale_tile(layer, shape)
    kind = _scales_kind(layer)
    scales = layer.tensor(kind).float()
    if kind == "SCB":
        scales = scales / _LARGEST_INT8
    order = _column_order(layer)
    if layer.has("weight_zero_point"):
        weight = weight - _spread(layer.tensor("weight_zero_point").float(), tile, shape, order)
    return weight * _spread(scales, tile, shape, order)


def scales_of(layer: QuantisedLayer) -> np.ndarray:
    """Return the scales as a table, float32. Needs no torch."""
    kind = _scales_kind(layer)
    scales = to_float32(layer.array(kind))
    grid: np.ndarray = scales.reshape(_grid(scales.shape))
    return grid / np.float32(_LARGEST_INT8) if kind == "SCB" else grid


def tile_of(weight: Shape, scales: Shape, scheme: Scheme) -> tuple[int, int] | None:
    """Return the rows and columns of a matrix that share a scale; None: the scales do not tile it.

    The strategy decides if the folder declares one, and the shape must agree. The number of scales
    alone decides nothing: a matrix may have as many blocks as rows.
    """
    rows, columns = weight
    grid = _grid(scales)
    tiles = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, scheme.group_size or columns // max(grid[1], 1)),
        "block": scheme.block,
    }
    if scheme.strategy is not None:
        candidates = [tiles.get(scheme.strategy)]
    else:
        candidates = [tiles["tensor"], scheme.block or tiles["channel"], tiles["channel"]]
        if scheme.block is None:
            candidates.append(tiles["group"])
    for tile in candidates:
        if tile is not None and min(tile) > 0 and _fits(weight, grid, tile):
            return tile
    return None


def _grid(scales: Shape) -> tuple[int, int]:
    """Return the rows and columns of scales, which some libraries store in 1 or 4 dimensions."""
    if len(scales) == 4 and scales[1] == scales[3] == 1:
        return scales[0], scales[2]
    if len(scales) <= 2:
        tall, wide = (*scales, 1, 1)[:2]
        return tall, wide
    return 0, 0


def _fits(weight: Shape, grid: tuple[int, int], tile: tuple[int, int]) -> bool:
    whole_groups = tile[0] > 1 or weight[1] % tile[1] == 0
    counts = tuple(-(-size // each) for size, each in zip(weight, tile, strict=True))
    return whole_groups and grid == counts


def scale_tile(layer: QuantisedLayer, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises SourceError if scales do not fit."""
    kind = _scales_kind(layer)
    scheme = Scheme(strategy="channel") if kind == "SCB" else layer.scheme
    scales = layer.slot(kind).shape
    tile = None if 0 in scales else tile_of(shape, scales, scheme)
    if tile is None:
        how = f" for the strategy {scheme.strategy!r}" if scheme.strategy else ""
        if scheme.strategy == "group" and scheme.group_size:
            how += f" with groups of {scheme.group_size}"
        if scheme.strategy in (None, "block") and scheme.block:
            how += f" with blocks of {scheme.block[0]} x {scheme.block[1]}"
        raise layer.misfit(kind, f"weight has shape {list(shape)}{how}")
    if layer.has("weight_zero_point") and layer.slot("weight_zero_point").shape != scales:
        raise layer.misfit("weight_zero_point", f"{kind} has shape {list(scales)}")
    return tile


def _scales_kind(layer: QuantisedLayer) -> str:
    for kind in ("weight_scale", "weight_scale_inv", "SCB"):
        if layer.has(kind):
            return kind
    raise layer.absent("weight_scale")


def _column_order(layer: QuantisedLayer) -> torch.Tensor | None:
    """Return the group of each column; None: groups are neighbouring columns."""
    if not layer.has("weight_g_idx"):
        return None
    index = layer.tensor("weight_g_idx").long()
    return None if bool((index < 0).any()) else index


def _spread(
    scales: torch.Tensor,
    tile: tuple[int, int],
    shape: tuple[int, int],
    order: torch.Tensor | None,
) -> torch.Tensor:
    """Return a scale for each weight, as [1 or out, 1 or in]."""
    grid = scales.reshape(_grid(tuple(scales.shape)))
    if order is not None:
        return grid[:, order]
    for axis in (0, 1):
        if grid.shape[axis] > 1 and tile[axis] > 1:
            grid = grid.repeat_interleave(tile[axis], axis).narrow(axis, 0, shape[axis])
    return grid
