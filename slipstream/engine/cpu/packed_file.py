"""A file with an engine's packed weights: written by the first start, mapped by later ones.

Later starts pack nothing, and processes that map the file share its memory.

    matrices       each at a multiple of 4096 bytes
    description    JSON
    tail           the length of the description and MAGIC

The file is written without a name and gets one when it is whole, so a process that is killed leaves
nothing. A file that is damaged, of other weights or of another layout is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipstream.engine.memory.cores import usable_cores
from slipstream.kernels import blocks
from slipstream.kernels.cpu import layout, pack, pack_levels, quantised_layouts
from slipstream.kernels.cpu.memory import aligned, round_up
from slipstream.kernels.cpu.operations import WeightFormat
from slipstream.kernels.cpu.pack import Packed

logger = logging.getLogger(__name__)

_MAGIC = b"PACKED01"
_TAIL = struct.Struct("<q8s")
_PAGE = mmap.ALLOCATIONGRANULARITY
_SPARE_DISK = 1 << 30  # bytes that stay free


@cache
def _layout_hash() -> str:
    """Return a hash of the code that decides what packed weights are."""
    from slipstream.engine.cpu import weights

    digest = hashlib.sha256()
    for module in (blocks, layout, quantised_layouts, pack, pack_levels, weights):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


class PackedFile:
    """The packed matrices of an engine, by name: those of the file, or those to write to it."""

    def __init__(
        self,
        folders: Sequence[Path],
        name: str,
        weights: str,
        dtype: str,
        weight_bytes: int,
        own_memory: bool = False,
    ) -> None:
        """folders: where the file may be; the first one that can be written gets it

        weights: a digest of the weights of this rank's part; weight_bytes: about the size of the
        file; own_memory: copy the matrices, as the file's memory may be far from these cores
        """
        self._name = name
        self._key = f"{weights} {dtype} {_layout_hash()}"
        known = (_read(folder / name, self._key) for folder in folders)
        self._found = next((found for found in known if found is not None), None)
        self._own_memory = own_memory
        self._writer: _Writer | None = None
        self._folder = folders[0]
        if self._found is None:
            self._create(folders, weight_bytes)

    def _create(self, folders: Sequence[Path], size: int) -> None:
        """Create the file in the first folder where that is possible."""
        for folder in folders:
            self._writer = _Writer.create(folder, size)
            if self._writer is not None:
                self._folder = folder
                return

    def find(self, name: str) -> tuple[Packed, ...] | None:
        """Return the parts of a matrix; None if they must be packed."""
        parts = None if self._found is None else self._found.get(name)
        return tuple(map(_copied, parts)) if parts and self._own_memory else parts

    def add(self, name: str, parts: Sequence[Packed]) -> tuple[Packed, ...]:
        """Write the parts of a matrix. Return them, in the memory of the file if possible."""
        if self._writer is None:
            return tuple(parts)
        try:
            written = self._writer.add(name, parts)
            return tuple(parts) if self._own_memory else written
        except OSError as error:
            self._give_up(error)
            return tuple(parts)

    def finish(self) -> None:
        """Give the file its name."""
        if self._writer is None:
            return
        try:
            self._writer.finish(self._folder / self._name, self._key)
        except OSError as error:
            self._give_up(error)
        else:
            self._writer = None

    def _give_up(self, error: OSError) -> None:
        logger.info("cannot keep packed weights in %s (%s)", self._folder, error)
        assert self._writer is not None
        self._writer.close()
        self._writer = None


class _Entry(NamedTuple):
    """Where a part of a matrix is."""

    format: int
    start: int
    bytes: int
    outputs: int
    inputs: int
    sha256: str


class _Writer:
    def __init__(self, file: int) -> None:
        self._file = file
        self._end = 0
        self._matrices: dict[str, list[_Entry]] = {}

    @classmethod
    def create(cls, folder: Path, size: int) -> _Writer | None:
        """Return a writer; None if the folder is read-only, its disk has no room for a file of this
        size, or its file system lacks files without a name.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free <= size + _SPARE_DISK:
                logger.info(
                    "cannot keep packed weights in %s (%d MiB are free)", folder, free >> 20
                )
                return None
            return cls(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644))
        except OSError as error:
            logger.info("cannot keep packed weights in %s (%s)", folder, error)
            return None

    def add(self, name: str, parts: Sequence[Packed]) -> tuple[Packed, ...]:
        found = []
        entries: list[_Entry] = []
        for part in parts:
            start = self._end
            size = part.data.nbytes
            self._write(start, part.data.data)
            self._end = round_up(start + size, _PAGE)
            digest = hashlib.sha256(part.data.data).hexdigest()
            entries.append(_Entry(part.format, start, size, part.outputs, part.inputs, digest))
            mapped = mmap.mmap(self._file, size, access=mmap.ACCESS_READ, offset=start)
            data = np.frombuffer(mapped, dtype=np.uint8)
            found.append(Packed(part.format, data, part.outputs, part.inputs))
        self._matrices[name] = entries
        return tuple(found)

    def finish(self, path: Path, key: str) -> None:
        text = json.dumps({"key": key, "matrices": self._matrices}).encode()
        self._write(self._end, memoryview(text + _TAIL.pack(len(text), _MAGIC)))
        path.unlink(missing_ok=True)
        # Another process may have written the same at the same time. The folder is not needed, as
        # the source is absolute, but with it os.link follows the link to the file.
        with suppress(FileExistsError):
            os.link(f"/proc/self/fd/{self._file}", path, src_dir_fd=self._file)
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def _write(self, start: int, data: memoryview) -> None:
        data = data.cast("B")
        while data:
            written = os.pwrite(self._file, data, start)
            start += written
            data = data[written:]


def _read(path: Path, key: str) -> dict[str, tuple[Packed, ...]] | None:
    """Return the matrices of a file, mapped; None if there is none with this key."""
    try:
        with path.open("rb") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return _parse(memory, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        logger.warning("%s is damaged (%s); the weights are packed again", path, error)
        return None


def _parse(memory: np.ndarray, key: str) -> dict[str, tuple[Packed, ...]] | None:
    length, magic = _TAIL.unpack(memory[-_TAIL.size :].tobytes())
    end = len(memory) - _TAIL.size
    if magic != _MAGIC or not 0 < length <= end:
        raise ValueError("its end is missing")
    described = json.loads(memory[end - length : end].tobytes())
    if described["key"] != key:
        return None
    found: dict[str, tuple[Packed, ...]] = {}
    digests: list[tuple[Packed, str]] = []
    for name, parts in described["matrices"].items():
        entries = [_Entry(*part) for part in parts]
        found[name] = tuple(_packed(memory, entry) for entry in entries)
        digests += zip(found[name], (entry.sha256 for entry in entries), strict=True)
    with ThreadPoolExecutor(max(1, int(usable_cores())), "check packed weights") as threads:
        if not all(threads.map(_is_whole, digests)):
            raise ValueError("a SHA-256 differs")
    return found


def _is_whole(recorded: tuple[Packed, str]) -> bool:
    packed, digest = recorded
    return hashlib.sha256(packed.data.data).hexdigest() == digest


def _copied(part: Packed) -> Packed:
    """Return a part of a matrix in memory of this process."""
    data = aligned(part.data.nbytes)
    data[:] = part.data
    return replace(part, data=data)


def _packed(memory: np.ndarray, entry: _Entry) -> Packed:
    end = entry.start + entry.bytes
    if not 0 <= entry.start < end <= len(memory):
        raise ValueError("a matrix is outside the file")
    data = memory[entry.start : end]
    return Packed(WeightFormat(entry.format), data, entry.outputs, entry.inputs)
