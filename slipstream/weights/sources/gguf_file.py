"""Read a GGUF file's metadata and tensor table, and check them against the size of the file.

The reader of the gguf package creates an object for every token and merge, which takes seconds for
a large vocabulary. This reader is fast, so an unsupported file is refused at once.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from slipstream.weights.parameters import Shape
from slipstream.weights.sources.source import SourceError

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4  # of arrays of arrays in the metadata
# Models have up to a few thousand tensors with some hundred experts, 100 keys of metadata, and
# vocabularies of 300,000 tokens with twice as many merges. More would be minutes of work for a file
# that is damaged or made to hold it up.
_MAX_TENSORS = 65_536
_MAX_EXPERTS = 4_096
_MAX_EXPERT_TENSORS = 262_144
_MAX_METADATA_VALUES = 1_500_000  # an array of numbers counts as one
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    kind: GGMLQuantizationType
    shape: Shape  # shape in torch's order, the reverse of the file's
    offset: int  # position from the start of the file

    @property
    def row_bytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // values * size

    @property
    def nbytes(self) -> int:
        return self.row_bytes * prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]  # values; an array of numbers is a numpy array, of strings a list
    tensors: dict[str, GgufTensor]
    data: mmap.mmap

    def read_raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a tensor as stored: uint8 [rows, row_bytes]."""
        tensor = self.tensors[name]
        count = (stop - start) * tensor.row_bytes
        flat = np.frombuffer(self.data, np.uint8, count, tensor.offset + start * tensor.row_bytes)
        return flat.reshape(stop - start, tensor.row_bytes)

    def split_experts(self) -> GgufFile:
        """Return the file with one tensor per expert instead of one tensor for all experts."""
        tensors: dict[str, GgufTensor] = {}
        for name, tensor in self.tensors.items():
            if not name.endswith("_exps.weight") or len(tensor.shape) != 3:
                tensors[name] = tensor
                continue
            count, *shape = tensor.shape
            if count > _MAX_EXPERTS or len(tensors) + count > _MAX_EXPERT_TENSORS:
                raise SourceError(
                    f"{self.path}: damaged: tensor {name} has {count} experts; models have at most "
                    f"{_MAX_EXPERTS}, and {_MAX_EXPERT_TENSORS} tensors of experts in all layers"
                )
            for expert in range(count):
                offset = tensor.offset + expert * (tensor.nbytes // count)
                tensors[f"{name.removesuffix('.weight')}.{expert}.weight"] = replace(
                    tensor, shape=tuple(shape), offset=offset
                )
        return replace(self, tensors=tensors)

    def read_floats(self, name: str) -> np.ndarray:
        """Return a small F32 tensor."""
        tensor = self.tensors[name]
        if tensor.kind != GGMLQuantizationType.F32:
            raise SourceError(f"{self.path}: tensor {name} is not of type F32")
        return np.frombuffer(self.data, "<f4", prod(tensor.shape), tensor.offset).reshape(
            tensor.shape
        )


def read_gguf(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise SourceError(f"{path}: not a GGUF file")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    cursor = _Cursor(data, 4)
    try:
        return _parse(path, data, cursor)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"{path}: cut short or damaged in its header; download the file again"
        ) from error


def _parse(path: Path, data: mmap.mmap, cursor: _Cursor) -> GgufFile:
    version = cursor.number("<I")
    if version not in (2, 3):
        raise SourceError(
            f"{path}: GGUF version {version} is not supported "
            "(2 and 3 are; big-endian files are not)"
        )
    tensor_count = cursor.number("<Q")
    entry_count = cursor.number("<Q")
    if tensor_count > _MAX_TENSORS:
        raise SourceError(f"{path}: damaged: its header has {tensor_count} tensors")
    metadata = {}
    for _ in range(entry_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    described = [_read_tensor(path, cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"alignment {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(kind, shape, start + offset) for name, kind, shape, offset in described
    }
    for name, tensor in tensors.items():
        if tensor.offset + tensor.nbytes > len(data):
            raise SourceError(
                f"{path}: cut short: tensor {name} ends at byte {tensor.offset + tensor.nbytes}, "
                f"the file has {len(data)}; download the file again"
            )
    return GgufFile(path, metadata, tensors, data)


def _read_tensor(path: Path, cursor: _Cursor) -> tuple[str, GGMLQuantizationType, Shape, int]:
    name = cursor.string()
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    if not all(shape):
        raise SourceError(f"{path}: damaged: tensor {name} has a dimension of 0")
    code = cursor.number("<I")
    offset = cursor.number("<Q")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as error:
        raise SourceError(f"{path}: tensor {name} has type {code}, which is not known") from error
    if shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise ValueError(f"{name} does not fill whole blocks")
    return name, kind, shape, offset


class _Cursor:
    """Reads the values of a file in order. Reading past the end raises."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position
        self._values = 0  # number of values of metadata that were read

    def number(self, form: str) -> int:
        value: int = struct.unpack_from(form, self._data, self.position)[0]
        self.position += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.number("<Q")
        end = self.position + length
        if end > len(self._data):
            raise IndexError("string beyond the end")
        text = self._data[self.position : end].decode("utf-8", "replace")
        self.position = end
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        self._values += 1
        if self._values > _MAX_METADATA_VALUES:
            raise ValueError("too many values of metadata")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        if depth == _MAX_DEPTH:
            raise ValueError("arrays are nested too deeply")
        kind = self.number("<I")
        count = self.number("<Q")
        if count > len(self._data):
            raise IndexError("array beyond the end")
        if kind in _SCALARS:
            return self._numbers(kind, count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        form = np.dtype(_SCALARS[kind]) if kind in _SCALARS else None
        if form is None:
            raise ValueError(f"value type {kind}")
        numbers = np.frombuffer(self._data, form, count, self.position)
        self.position += form.itemsize * count
        return numbers
