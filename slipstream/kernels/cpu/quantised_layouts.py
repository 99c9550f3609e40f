"""The layouts of quantised weights: levels of 4 or 8 bits, with scales and perhaps offsets.

32 outputs begin with 32 float32 factors. Groups of 32 inputs follow. A group has float16 scales of
the 32 outputs, then float16 offsets if the format has them, each once for 32 inputs or twice, for
16 inputs each. Levels follow: 64 bytes hold four bytes of 16 outputs each, and the first 16 outputs
come first. A byte of 4-bit levels holds inputs i and 16 + i.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.kernels.cpu.layout import BLOCK, GROUP
from slipstream.kernels.cpu.operations import WeightFormat

FACTOR_BYTES = BLOCK * 4


@dataclass(frozen=True, slots=True)
class LevelLayout:
    format: WeightFormat
    bits: int
    parts: int  # scales of a group
    has_offsets: bool

    @property
    def offsets_start(self) -> int:
        """Bytes of a group in front of its offsets."""
        return self.parts * BLOCK * 2

    @property
    def levels_start(self) -> int:
        """Bytes of a group in front of its levels."""
        return self.offsets_start * (2 if self.has_offsets else 1)

    @property
    def words(self) -> int:
        """32-bit words of an output's levels in a group."""
        return GROUP * self.bits // 32

    @property
    def group_bytes(self) -> int:
        return self.levels_start + BLOCK * self.words * 4

    @property
    def bias(self) -> int:
        """Return the number that is added to levels so that they have no sign."""
        return 128 if self.bits == 8 else 0


LAYOUTS = (
    LevelLayout(WeightFormat.INT4, 4, 1, True),
    LevelLayout(WeightFormat.INT4_HALVES, 4, 2, True),
    LevelLayout(WeightFormat.INT8, 8, 1, False),
    LevelLayout(WeightFormat.INT8_OFFSET, 8, 1, True),
    LevelLayout(WeightFormat.INT8_HALVES, 8, 2, False),
)
LAYOUT_OF = {layout.format: layout for layout in LAYOUTS}
