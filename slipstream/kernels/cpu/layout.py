"""Sizes that compiled code and its callers share. No compiler is needed to read them."""

from __future__ import annotations

from slipstream.kernels.cpu.memory import round_up

LANES = 16  # of a vector of float32
LINE = 64  # bytes of a cache line
RINGS = 4  # sets of work counters
BLOCK = 32  # outputs of a linear layer that are packed together
GROUP = 32  # inputs that share a scale
TILE_BYTES = 4096  # results of a tile of a linear layer

# Attention
CHUNK = 256  # positions that are merged as one
MAX_HEAD_SIZE = 256
MAX_GROUP = 128  # query heads of a KV head
TILE_LANES = 64  # queries of a tile
PART_FLOATS = 16  # in front of the values of a part: largest score, sum of weights, empty
LANE_ROW = TILE_LANES * 4  # bytes of a number of all lanes

# A thread's memory for attention, in bytes from its begin. Singles and tiles share it.
OFFSETS = 0  # int64 [CHUNK + 16]
LANE_POSITIONS = 4096  # int32 [lanes]
LANE_TOPS = LANE_POSITIONS + LANE_ROW  # float32 [lanes]: largest score so far
LANE_SUMS = LANE_TOPS + LANE_ROW  # float32 [lanes]: sum of weights so far
LANE_SLOPES = LANE_SUMS + LANE_ROW  # float32 [lanes]: of position biases
SINGLE_SCORES = 8192  # float32 [group, CHUNK]
SINGLE_PARTS = SINGLE_SCORES + MAX_GROUP * CHUNK * 4  # two for each query of a group
_SINGLE_END = SINGLE_PARTS + 2 * MAX_GROUP * (MAX_HEAD_SIZE + PART_FLOATS) * 4
TILE_SCORES = 8192  # float32 [CHUNK, lanes]
TILE_WEIGHTS = TILE_SCORES + CHUNK * LANE_ROW
TILE_QUERIES = TILE_WEIGHTS + CHUNK * LANE_ROW  # [elements of a head, lanes]
TILE_OUTPUTS = TILE_QUERIES + MAX_HEAD_SIZE * LANE_ROW  # float32 [head_size, lanes]
TILE_VALUES = TILE_OUTPUTS + MAX_HEAD_SIZE * LANE_ROW
_TILE_END = TILE_VALUES + (CHUNK + LANES) * MAX_HEAD_SIZE * 4
ATTENTION_BYTES = max(_SINGLE_END, _TILE_END)


def thread_bytes(row_bytes: int) -> int:
    """Return the memory of a thread."""
    return round_up(TILE_BYTES + ATTENTION_BYTES + row_bytes, 4096)
