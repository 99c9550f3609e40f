"""The block formats of GGUF files: names and sizes. Needs no numpy, as the server reads configs."""

from __future__ import annotations

from typing import NamedTuple


class BlockSize(NamedTuple):
    weights: int  # of a block
    nbytes: int  # of a block

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. Raises ValueError if the columns do not fill whole blocks."""
        if columns % self.weights:
            raise ValueError(f"{columns} columns are not whole blocks of {self.weights} weights")
        return columns // self.weights * self.nbytes


BLOCK_SIZES = {
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q8_0": BlockSize(32, 34),
    "Q2_K": BlockSize(256, 84),
    "Q3_K": BlockSize(256, 110),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
    "IQ4_NL": BlockSize(32, 18),
    "IQ4_XS": BlockSize(256, 136),
}
