"""Weights in the block formats of GGUF files, as stored. Needs numpy only.

A row of a matrix is a sequence of blocks. A block holds a fixed number of weights in a fixed number
of bytes: small whole numbers (levels), and a scale for each group of them. Some formats add an
offset to each group:

    weight = scale of its group × level + offset of its group

`read_levels` takes the blocks apart, `expand` returns the weights. All formats share these two, so
that code that packs weights in another way needs to know none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.kernels.block_sizes import BLOCK_SIZES

_CHUNK_WEIGHTS = 1 << 18  # weights expanded at a time: they stay in a core's cache


class Levels(NamedTuple):
    """The parts of `n` blocks. The groups of a block have equal sizes."""

    numbers: np.ndarray  # int8 [n, weights]
    scales: np.ndarray  # float32 [n, groups]
    offsets: np.ndarray | None  # float32 [n, groups]; None: the format has none


@dataclass(frozen=True)
class BlockFormat:
    name: str  # as GGUF names it
    groups: int  # of a block: each has a scale
    read: Callable[[np.ndarray], Levels]  # uint8 [n, nbytes] → levels

    @property
    def weights(self) -> int:
        """Weights of a block."""
        return BLOCK_SIZES[self.name].weights

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return BLOCK_SIZES[self.name].nbytes

    def read_levels(self, raw: np.ndarray) -> Levels:
        """Return the levels of rows [rows, row bytes], with all blocks of a row in one row.

        numbers: [rows, columns]; scales and offsets: [rows, columns / weights × groups]
        """
        rows = raw.shape[0]
        found = self.read(raw.reshape(-1, self.nbytes))
        offsets = None if found.offsets is None else found.offsets.reshape(rows, -1)
        return Levels(found.numbers.reshape(rows, -1), found.scales.reshape(rows, -1), offsets)

    def expand(self, raw: np.ndarray) -> np.ndarray:
        """Return the weights of rows: uint8 [rows, row bytes] → float32 [rows, columns]."""
        rows = raw.shape[0]
        blocks = raw.reshape(-1, self.nbytes)
        out = np.empty((len(blocks), self.groups, self.weights // self.groups), np.float32)
        step = _CHUNK_WEIGHTS // self.weights
        for start in range(0, len(blocks), step):
            part = self.read(blocks[start : start + step])
            values = out[start : start + step]
            values[...] = part.numbers.reshape(values.shape)
            values *= part.scales[..., None]
            if part.offsets is not None:
                values += part.offsets[..., None]
        return out.reshape(rows, -1)


class BlockRows(NamedTuple):
    """Consecutive rows of a matrix in one format."""

    format: BlockFormat
    raw: np.ndarray  # uint8 [rows, row bytes], usually mapped from a file


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix whose rows are stored in blocks. Parts of a fused matrix may differ in format."""

    parts: tuple[BlockRows, ...]
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part.raw) for part in self.parts), self.columns

    @property
    def nbytes(self) -> int:
        return sum(part.raw.nbytes for part in self.parts)

    def take(self, ranges: Iterable[tuple[int, int]]) -> BlockMatrix:
        """Return the matrix of these ranges of rows, in their order. Copies nothing."""
        taken: list[BlockRows] = []
        for first, last in ranges:
            offset = 0
            for part in self.parts:
                low = max(first - offset, 0)
                high = min(last - offset, len(part.raw))
                if low < high:
                    taken.append(BlockRows(part.format, part.raw[low:high]))
                offset += len(part.raw)
        return BlockMatrix(tuple(taken), self.columns)

    def expand(self, most_bytes: int = 64 << 20) -> Iterator[np.ndarray]:
        """Yield the weights in order, float32 [some rows, columns] of about `most_bytes`."""
        step = max(1, most_bytes // (4 * self.columns))
        for part in self.parts:
            for start in range(0, len(part.raw), step):
                yield part.format.expand(part.raw[start : start + step])


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 that begins at this byte of each block, as float32 [n, 1]."""
    return _copied(blocks, start, start + 2).view("<f2").astype(np.float32)


def _copied(blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop])


def _split_bits(packed: np.ndarray, bits: int, count: int, run: int) -> np.ndarray:
    """Return numbers of `bits` bits: [n, bytes] → uint8 [n, numbers].

    Each run of bytes holds `count` times as many numbers, lowest bits first: one of every byte of
    the run, then the next one of every byte.
    """
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(0, bits * count, bits, dtype=np.uint8).reshape(-1, 1)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of all bytes, then the high ones: [n, k] → uint8 [n, 2k]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Return 16 for each bit that is set: uint8 [n, 4] → [n, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Levels:
    numbers = _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)
    return Levels(numbers, _halves(blocks, 0), None)


def _q4_1(blocks: np.ndarray) -> Levels:
    return Levels(_nibbles(blocks[:, 4:]).view(np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Levels:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(_copied(blocks, 2, 6))
    return Levels(numbers.view(np.int8) - np.int8(16), _halves(blocks, 0), None)


def _q5_1(blocks: np.ndarray) -> Levels:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(_copied(blocks, 4, 8))
    return Levels(numbers.view(np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Levels:
    return Levels(_copied(blocks, 2, 34).view(np.int8), _halves(blocks, 0), None)


def _q2_k(blocks: np.ndarray) -> Levels:
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15)
    offsets = _halves(blocks, 82) * (blocks[:, :16] >> 4)
    numbers = _split_bits(blocks[:, 16:80], 2, 4, run=32)
    return Levels(numbers.view(np.int8), scales, -offsets)


def _q3_k(blocks: np.ndarray) -> Levels:
    # The first 8 bytes of the scales hold the low four bits of each, the last 4 the high two.
    low = _nibbles(blocks[:, 96:104])
    high = _split_bits(blocks[:, 104:108], 2, 4, run=4)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    numbers = _split_bits(blocks[:, 32:96], 2, 4, run=32)
    numbers |= _split_bits(blocks[:, :32], 1, 8, run=32) << 2
    return Levels(numbers.view(np.int8) - np.int8(4), _halves(blocks, 108) * scales, None)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and offsets [n, 8] of Q4_K and Q5_K, which begin alike.

    Six bits each: the first four scales and offsets have a byte each, whose upper two bits are
    those of the last four. The lower four bits of these follow.
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    last = blocks[:, 12:16]
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6 << 4)), axis=1)
    offsets = np.concatenate((second & 63, (last >> 4) | (second >> 6 << 4)), axis=1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * -offsets.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Levels:
    numbers = _split_bits(blocks[:, 16:], 4, 2, run=32)
    return Levels(numbers.view(np.int8), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Levels:
    numbers = _split_bits(blocks[:, 48:], 4, 2, run=32)
    numbers |= _split_bits(blocks[:, 16:48], 1, 8, run=32) << 4
    return Levels(numbers.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Levels:
    numbers = _split_bits(blocks[:, :128], 4, 2, run=64)
    numbers |= _split_bits(blocks[:, 128:192], 2, 4, run=32) << 4
    scales = _halves(blocks, 208) * _copied(blocks, 192, 208).view(np.int8)
    return Levels(numbers.view(np.int8) - np.int8(32), scales, None)


_NONLINEAR = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.int8
)


def _iq4_nl(blocks: np.ndarray) -> Levels:
    return Levels(_NONLINEAR[_nibbles(blocks[:, 2:])], _halves(blocks, 0), None)


def _iq4_xs(blocks: np.ndarray) -> Levels:
    low = _split_bits(blocks[:, 4:8], 4, 2, run=1)
    high = _split_bits(blocks[:, 2:4], 2, 4, run=1)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    numbers = _NONLINEAR[_split_bits(blocks[:, 8:], 4, 2, run=16)]
    return Levels(numbers, _halves(blocks, 0) * scales, None)


BLOCK_FORMATS = {
    one.name: one
    for one in (
        BlockFormat("Q4_0", 1, _q4_0),
        BlockFormat("Q4_1", 1, _q4_1),
        BlockFormat("Q5_0", 1, _q5_0),
        BlockFormat("Q5_1", 1, _q5_1),
        BlockFormat("Q8_0", 1, _q8_0),
        BlockFormat("Q2_K", 16, _q2_k),
        BlockFormat("Q3_K", 16, _q3_k),
        BlockFormat("Q4_K", 8, _q4_k),
        BlockFormat("Q5_K", 8, _q5_k),
        BlockFormat("Q6_K", 16, _q6_k),
        BlockFormat("IQ4_NL", 1, _iq4_nl),
        BlockFormat("IQ4_XS", 8, _iq4_xs),
    )
}


def matrix_of(parts: Iterable[tuple[str, np.ndarray]]) -> BlockMatrix:
    """Return the matrix of parts (format name, uint8 [rows, row bytes]), which have the same number
    of columns.
    """
    rows = tuple(BlockRows(BLOCK_FORMATS[name], raw) for name, raw in parts)
    columns = {part.raw.shape[1] // part.format.nbytes * part.format.weights for part in rows}
    if len(columns) != 1:
        raise ValueError(f"parts of a matrix have {sorted(columns)} columns")
    return BlockMatrix(rows, columns.pop())
