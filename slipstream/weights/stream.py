"""Stream the rows of a source into the bytes of a file. Used by builds and conversions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.model.families.family import Recipe
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
    for part in parts:
        recipe = source.recipe(part)
        if recipe.rows is None:
            for name in recipe.sources:
                yield from _made_rows(source.read_rows(name), recipe)
            continue
        yield _ordered([source.read_rows(name) for name in recipe.sources], recipe)


def _ordered(sources: list[Iterator[torch.Tensor]], recipe: Recipe) -> torch.Tensor:
    """Return the rows of all sources in the order of the recipe."""
    import torch

    assert recipe.rows is not None
    blocks: list[torch.Tensor] = []
    for source in sources:
        blocks += _made_rows(source, recipe)
    return torch.cat(blocks)[torch.tensor(recipe.rows())]


def _made_rows(blocks: Iterator[torch.Tensor], recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield the rows of a parameter out of the blocks of one source."""
    import torch

    if recipe.transposed or recipe.stacked:
        whole = torch.cat(list(blocks))
        if recipe.stacked:
            whole = whole.reshape(recipe.stacked, -1, whole.shape[-1])
        if recipe.transposed:
            whole = whole.transpose(-1, -2)
        yield whole.reshape(-1, whole.shape[-1]).contiguous()
        return
    for block in blocks:
        if recipe.flat:
            yield block.flatten()
        elif recipe.unit_rows:
            yield torch.nn.functional.normalize(block.float())
        else:
            yield block


def tensor_bytes(block: torch.Tensor, dtype: str) -> memoryview:
    """Return the bytes of a tensor cast to `dtype`."""
    import torch

    cast = block.to(getattr(torch, dtype)).contiguous()
    # numpy has no bfloat16, so the tensor is viewed as bytes
    return memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]
