"""Prefill attention's schedule: the new tokens of rows are cut into tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.gpu.launch import power_of_two, shared_memory

# Tokens of a row from which on large tiles are faster: they read keys less often, small tiles
# compute less that is masked.
LARGE_TILES_FROM = 3072
QUERY_TILE = 64
_LARGE_QUERY_TILE = 128
_LARGE_TILE_BYTES = 230_400  # shared memory that large tiles take


@dataclass(slots=True)
class PrefillPlan:
    """The result of `cut_tiles`: int32, on the device. A tile is some queries of one row."""

    tile_token: Tensor  # [tiles]: the step's token of the first query
    tile_position: Tensor  # [tiles]: its position
    tile_queries: Tensor  # [tiles]
    tile_row: Tensor  # [tiles]: row of the block tables
    tile_cached: Tensor  # [tiles]: tokens of the row that were cached before this step
    large_tiles: bool = False


def single_tokens(rows: Tensor, positions: Tensor) -> PrefillPlan:
    """Return the plan of a step with one new token in each row: int32 [rows] each."""
    tokens = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return PrefillPlan(tokens, positions, torch.ones_like(tokens), rows, positions)


class HostTiles(NamedTuple):
    """The arrays of a PrefillPlan, on the host: int32 [tiles] each."""

    token: np.ndarray
    position: np.ndarray
    queries: np.ndarray
    row: np.ndarray
    cached: np.ndarray


def cut_tiles(
    rows: np.ndarray,
    positions: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    large_tiles: bool = False,
) -> HostTiles:
    """Return the tiles of rows that compute counts[i] tokens from positions[i], at the step's
    offsets[i].

    Later tiles of a row attend to more keys. They go first, so that the last CTAs are short.
    """
    size = query_tile(large_tiles)
    tiles = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), tiles)
    index = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    begin = index * size
    order = np.argsort(-(positions[row] + begin), kind="stable")
    row = row[order]
    begin = begin[order]
    queries = np.minimum(counts[row] - begin, size)
    return HostTiles(
        token=(offsets[row] + begin).astype(np.int32),
        position=(positions[row] + begin).astype(np.int32),
        queries=queries.astype(np.int32),
        row=rows[row].astype(np.int32),
        cached=positions[row].astype(np.int32),
    )


def use_large_tiles(longest: int, dtype: torch.dtype, size: int, device: torch.device) -> bool:
    """Return whether to cut a step into large tiles. longest: tokens of its longest row"""
    fits = shared_memory(device) >= _LARGE_TILE_BYTES
    return longest >= LARGE_TILES_FROM and uses_descriptors(dtype, size) and fits


def uses_descriptors(dtype: torch.dtype, size: int) -> bool:
    """Return whether the copy engine (TMA) loads tiles of heads of this size.

    It takes widths that are powers of two. Larger types and heads leave no room for its queues.
    """
    return dtype != torch.float32 and 16 <= size <= 128 and size == power_of_two(size)


def query_tile(large_tiles: bool) -> int:
    """Return the queries of a tile."""
    return _LARGE_QUERY_TILE if large_tiles else QUERY_TILE
