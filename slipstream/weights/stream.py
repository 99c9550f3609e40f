"""Stream the rows of a source into the bytes of a file. Used by builds and conversions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.weights.sources.source import Source, SourceError

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]  # (phase, bytes done, bytes in all)

_SPARE_DISK_BYTES = 64 << 20  # space for tokenizer files and file-system metadata


def no_progress(phase: str, done: int, total: int) -> None:
    pass


class ByteMeter:
    """Counts bytes and reports the sum."""

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
    """Raise SourceError if the disk has too little space for `needed` bytes."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed + _SPARE_DISK_BYTES:
        raise SourceError(
            f"{output}: needs {(needed + _SPARE_DISK_BYTES) / 1e9:.1f} GB of disk, "
            f"{free / 1e9:.1f} GB are free; make room or choose another folder"
        )


def parameter_rows(source: Source, parts: tuple[str, ...]) -> Iterator[torch.Tensor]:
    """Yield the rows of checkpoint parameters in blocks, one parameter after the other."""
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
    """Return the bytes of a tensor cast to `dtype`."""
    import torch

    cast = block.to(getattr(torch, dtype)).contiguous()
    # numpy has no bfloat16, so the tensor is viewed as bytes
    return memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]
