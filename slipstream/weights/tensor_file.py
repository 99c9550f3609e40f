"""Read and map a safetensors file, and write such a file as a stream. No torch.

The library's `save_file` needs all tensors in memory at once. The writer here makes the header from
the shapes alone, then writes and hashes one tensor after another. A file holds:

    8 bytes           length n of the header
    n bytes           JSON, padded with spaces
    the rest          bytes of the tensors, in order and without gaps
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.kernels.stored import StoredArray
from slipstream.weights.parameters import ITEM_BYTES, TensorSlot

# The format allows headers of 100 MB. An entry takes about 120 bytes, and files have at most some
# thousand tensors: checkpoints with more of them are cut into several files.
_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 131_072
# First bytes of the file that git checks out if git-lfs did not fetch the large file.
_POINTER_START = b"version "
# The first tensor starts at a cache line. With usual sizes, so do the others.
_DATA_ALIGNMENT = 64


# numpy has no bfloat16 and no 8-bit floats: their bits are numbers without a sign
_NUMPY_TYPES = {
    "F64": "<f8",
    "I64": "<i8",
    "F32": "<f4",
    "I32": "<i4",
    "F16": "<f2",
    "BF16": "<u2",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
}


class _Entry(msgspec.Struct, gc=False):
    """One tensor of a header.

    The file's metadata is read as an entry, too, and dropped. Its values are strings.
    """

    dtype: str = ""
    shape: tuple[int, ...] | str | None = None
    data_offsets: tuple[int, ...] | str | None = None


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_METADATA = "__metadata__"


class TensorFileError(ValueError):
    """The file is not a complete safetensors file. The text names the file and what is wrong."""


@dataclass(frozen=True)
class TensorHeader:
    slots: dict[str, TensorSlot]
    digest: str  # SHA-256 of the header: names, types, shapes and offsets
    file_bytes: int


def read_header(path: Path) -> TensorHeader:
    """Return the names, types and shapes of a file. Raises TensorFileError if bytes are missing."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if first == _POINTER_START:
                raise TensorFileError(
                    f"{path}: a git-lfs pointer, not the weights; run `git lfs pull` there"
                )
            length = int.from_bytes(first, "little")
            if file_bytes < 8 or length > file_bytes - 8:
                raise TensorFileError(f"{path}: not a safetensors file, or cut short in its header")
            if length > _MAX_HEADER_BYTES:
                raise TensorFileError(
                    f"{path}: its header has {length} bytes; at most {_MAX_HEADER_BYTES} are read"
                )
            raw = file.read(length)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _read_entries(path, raw)
    slots = _check_slots(path, entries, file_bytes - 8 - length)
    return TensorHeader(slots, hashlib.sha256(raw).hexdigest(), file_bytes)


def map_tensors(path: Path) -> dict[str, StoredArray]:
    """Return the tensors of a file, read-only. They use no memory of their own: processes share
    its pages.

    Raises like `read_header`.
    """
    slots = read_header(path).slots
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offset = len(data) - sum(slot.nbytes for slot in slots.values())
    tensors = {}
    for name, slot in slots.items():
        flat = np.frombuffer(data, _NUMPY_TYPES[slot.dtype], prod(slot.shape), offset)
        tensors[name] = StoredArray(slot.dtype, flat.reshape(slot.shape))
        offset += slot.nbytes
    return tensors


def _read_entries(path: Path, raw: bytes) -> dict[str, _Entry]:
    # Each entry is an object, so this bounds the entries before they are parsed. A brace of the
    # syntax cannot be written as an escape.
    if raw.count(b"{") > _MAX_TENSORS + 2:
        raise TensorFileError(f"{path}: its header has more than {_MAX_TENSORS} tensors")
    try:
        entries = _ENTRIES.decode(raw)
    except msgspec.ValidationError as error:
        raise TensorFileError(
            f"{path}: damaged: an entry of its header cannot be read: {error}"
        ) from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TensorFileError(f"{path}: not a safetensors file: its header is not JSON") from error
    entries.pop(_METADATA, None)
    return entries


def _check_slots(path: Path, entries: dict[str, _Entry], data_bytes: int) -> dict[str, TensorSlot]:
    places = [_place(path, name, entry) for name, entry in entries.items()]
    places.sort(key=itemgetter(0, 1))
    slots = {}
    end_of_last = 0
    for begin, end, name, slot in places:
        if begin != end_of_last or end - begin != slot.nbytes:
            raise TensorFileError(
                f"{path}: damaged: tensor {name} does not occupy the bytes its shape needs"
            )
        end_of_last = end
        slots[name] = slot
    if end_of_last != data_bytes:
        raise TensorFileError(
            f"{path}: holds {data_bytes} bytes of tensors where its header says {end_of_last}: "
            f"{'cut short' if data_bytes < end_of_last else 'bytes follow the last tensor'}"
        )
    return slots


def _place(path: Path, name: str, entry: _Entry) -> tuple[int, int, str, TensorSlot]:
    """Return (begin, end, name, slot) of a tensor."""
    shape = entry.shape
    offsets = entry.data_offsets
    if (
        not isinstance(shape, tuple)
        or not isinstance(offsets, tuple)
        or len(offsets) != 2
        or min(*offsets, *shape) < 0
    ):
        raise TensorFileError(f"{path}: damaged: the header's entry for {name} cannot be read")
    if entry.dtype not in ITEM_BYTES:
        raise TensorFileError(
            f"{path}: tensor {name} has type {entry.dtype}, which is not supported"
        )
    return offsets[0], offsets[1], name, TensorSlot(entry.dtype, shape)


def header_bytes(layout: Mapping[str, TensorSlot]) -> bytes:
    """Return the header of a file with these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, slot in layout.items():
        entries[name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [offset, offset + slot.nbytes],
        }
        offset += slot.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_size(layout: Mapping[str, TensorSlot]) -> int:
    return len(header_bytes(layout)) + sum(slot.nbytes for slot in layout.values())


def write_tensors(
    path: Path,
    layout: Mapping[str, TensorSlot],
    pieces: Iterable[tuple[str, Any]],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str:
    """Write the file and return its SHA-256.

    `pieces` are (tensor name, buffer) in layout order. A tensor may have several pieces. Raises
    ValueError if a tensor has too few or too many bytes or is out of order.
    """
    remaining = {name: slot.nbytes for name, slot in layout.items() if slot.nbytes}
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = header_bytes(layout)
        file.write(header)
        digest.update(header)
        for name, piece in pieces:
            view = memoryview(piece).cast("B")
            if not len(view):
                continue
            if name != next(iter(remaining), None) or len(view) > remaining[name]:
                raise ValueError(
                    f"{path.name}: tensor {name} was written twice, out of order or too long"
                )
            file.write(view)
            digest.update(view)
            on_bytes(len(view))
            remaining[name] -= len(view)
            if not remaining[name]:
                del remaining[name]
        if remaining:
            raise ValueError(f"{path.name}: tensors were not written: {', '.join(remaining)}")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
