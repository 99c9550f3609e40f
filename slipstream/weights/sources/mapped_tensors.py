"""The tensors of one or more safetensors files, mapped and read by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slipstream.kernels.stored import StoredArray
from slipstream.weights.parameters import DTYPE_CODES, TensorSlot
from slipstream.weights.sources.source import SourceError, row_blocks
from slipstream.weights.tensor_file import (
    TensorFileError,
    TensorHeader,
    map_tensors,
    read_header,
)

if TYPE_CHECKING:
    import torch


class _Place(NamedTuple):
    path: Path
    stored_name: str
    slot: TensorSlot


class MappedTensors:
    """The tensors of several files as one table.

    `rename` returns the name for a stored tensor, or None to leave the tensor out.
    """

    def __init__(self, paths: Sequence[Path], rename: Callable[[str], str | None]) -> None:
        self._headers = {path: _read_header(path) for path in paths}
        self._places: dict[str, _Place] = {}
        self._mapped: dict[Path, dict[str, StoredArray]] = {}
        for path, header in self._headers.items():
            for stored, slot in header.slots.items():
                name = rename(stored)
                if name in self._places:
                    raise SourceError(
                        f"{path}: tensor {stored} is in {self._places[name].path.name}, too"
                    )
                if name is not None:
                    self._places[name] = _Place(path, stored, slot)

    @property
    def slots(self) -> dict[str, TensorSlot]:
        return {name: place.slot for name, place in self._places.items()}

    @property
    def dtype(self) -> str | None:
        """Return the 16-bit type of most bytes, or None without a 16-bit tensor."""
        counts = dict.fromkeys(("float16", "bfloat16"), 0)
        for slot in self.slots.values():
            for dtype in counts:
                counts[dtype] += slot.nbytes if slot.dtype == DTYPE_CODES[dtype] else 0
        most = max(counts, key=counts.__getitem__)
        return most if counts[most] else None

    def read_rows(
        self, name: str, first: int = 0, last: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the rows from `first` to `last` (exclusive; default: all) in blocks."""
        from safetensors import safe_open

        path, stored, slot = self._places[name]
        rows = (slot.shape[0] if last is None else last) - first
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(stored)
            for start, stop in row_blocks(rows, slot.nbytes // slot.shape[0]):
                yield part[first + start : first + stop]

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a tensor of any number of dimensions."""
        from safetensors import safe_open

        path, stored, _ = self._places[name]
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def map_array(self, name: str) -> StoredArray:
        """Return a tensor, mapped from its file. Needs no torch."""
        path, stored, _ = self._places[name]
        if path not in self._mapped:
            self._mapped[path] = map_tensors(path)
        return self._mapped[path][stored]

    def fingerprint(self) -> str:
        """Return the header's hash, the size and the modification time of each file.

        This detects a changed file without reading its weights.
        """
        return "\n".join(
            f"{path.name}:{header.digest}:{header.file_bytes}:{path.stat().st_mtime_ns}"
            for path, header in self._headers.items()
        )


def _read_header(path: Path) -> TensorHeader:
    try:
        return read_header(path)
    except TensorFileError as error:
        raise SourceError(f"{error}; download the file again") from error
