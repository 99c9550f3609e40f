"""From a source's rows to the bytes of a file, a block at a time; what building and converting
share.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.weights.sources.source import Source, SourceError

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]  # (phase, bytes done, bytes in all)

_SPARE_DISK_BYTES = 64 << 20  # for the tokenizer and the file system's own needs


def no_progress(phase: str, done: int, total: int) -> None:
    pass


class ByteMeter:
    """Counts bytes and passes the sum on."""

    def __init__(self, phase: str, total: int, progress: Progress) -> None:
        self._phase = phase
        self._total = total
        self._progress = progress
        self._done = 0
        progress(phase, 0, total)

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._phase, self._done, self._total)


def check_disk(output: Path, needed: int) -> None:
    """Refuse before the first byte when the disk cannot hold the last."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed + _SPARE_DISK_BYTES:
        raise SourceError(
            f"{output}: needs {(needed + _SPARE_DISK_BYTES) / 1e9:.1f} GB of disk, "
            f"{free / 1e9:.1f} GB are free; make room or choose another place"
        )


def parameter_rows(source: Source, parts: tuple[str, ...]) -> Iterator[torch.Tensor]:
    """The rows of checkpoint parameters, one after the other."""
    import torch

    for part in parts:
        recipe = source.recipe(part)
        if recipe.rows is not None:
            joined = torch.cat(
                [block for name in recipe.sources for block in source.read_rows(name)]
            )
            yield joined[torch.tensor(recipe.rows())]
            continue
        for name in recipe.sources:
            if recipe.transposed:
                yield torch.cat(list(source.read_rows(name))).t().contiguous()
            else:
                yield from source.read_rows(name)


def tensor_bytes(block: torch.Tensor, dtype: str) -> memoryview:
    """The bytes of a tensor after the cast; numpy has no bfloat16, so they go through as bytes."""
    import torch

    return memoryview(block.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
