"""Matrices of 2, 4 or 8-bit integers, several in a word of 32 bits, with a scale and a zero point
for each group of columns: GPTQ, AWQ and the packed layout of compressed-tensors. Needs no torch.

    GPTQ                P.qweight [in * bits / 32, out], P.qzeros [groups, out * bits / 32],
                        P.scales [groups, out], P.g_idx [in]
    AWQ                 P.qweight [in, out / 8], P.qzeros [groups, out / 8], P.scales [groups, out]
    compressed-tensors  P.weight_packed [out, in * bits / 32], P.weight_scale [out, groups],
                        P.weight_zero_point [out * bits / 32, groups] or int8 [out, groups],
                        P.weight_g_idx [in], P.weight_shape
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slipstream.kernels.stored import to_float32
from slipstream.weights.sources.quantised.layer import QuantisedLayer
from slipstream.weights.sources.quantised.settings import QuantisationSettings, unread

_WORD_BITS = 32
_READ_BITS = (2, 4, 8)
_AWQ_ORDER = np.argsort((0, 2, 4, 6, 1, 3, 5, 7))  # the place of each column in a word


class Zeros(NamedTuple):
    """The zero points of a matrix."""

    numbers: np.ndarray  # int16 [out, groups]
    # the middle of the numbers, where those of a symmetric matrix are
    centre: int


class Integers(NamedTuple):
    """An integer matrix: weight = (number - zero point of its group) * scale of its group."""

    numbers: np.ndarray  # uint8 [out, in]
    zeros: np.ndarray  # int16 [out, groups]
    scales: np.ndarray  # float32 [out, groups]
    group: np.ndarray  # the group of each column

    def expand(self) -> np.ndarray:
        """Return the weights, float32 [out, in]."""
        levels = self.numbers.astype(np.float32) - self.zeros[:, self.group]
        weights: np.ndarray = levels * self.scales[:, self.group]
        return weights


class IntegerLayout(NamedTuple):
    """How one library stores integer matrices."""

    shape: Callable[[QuantisedLayer], tuple[int, int]]  # checks the shapes of all tensors
    bits: Callable[[QuantisedLayer], int]
    zeros: Callable[[QuantisedLayer], Zeros]
    scales: Callable[[QuantisedLayer], np.ndarray]  # float32 [out, groups]
    groups: Callable[[QuantisedLayer], np.ndarray]  # the group of each column
    read: Callable[[QuantisedLayer], Integers]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of words, int32 [rows, n] → uint8 [rows, n * 32 / bits], from the lowest
    bits on.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (data[..., None] >> shifts) & np.uint8(2**bits - 1)
    return numbers.reshape(len(data), -1)


def _check_bits(layer: QuantisedLayer, found: int) -> int:
    """Return the bits of a layer. Raises SourceError if they are not read, or not the declared."""
    declared = layer.scheme.bits
    if declared is not None and declared not in _READ_BITS:
        raise unread(layer.label, f"{layer.method}, {declared} bits")
    if found not in _READ_BITS or declared not in (None, found):
        raise layer.misfit(_words_kind(layer), f"{declared or 'some'} bits a weight are declared")
    return found


def _words_kind(layer: QuantisedLayer) -> str:
    return "qweight" if layer.has("qweight") else "weight_packed"


def _groups(columns: int, count: int, declared: int | None) -> np.ndarray | None:
    """Return the group of each column; None: they do not fit together."""
    size = declared if declared is not None and count > 1 else -(-columns // max(count, 1))
    if -(-columns // size) != count:
        return None
    return np.arange(columns) // size


class _Gptq:
    """GPTQ's layout."""

    def __init__(self, settings: QuantisationSettings) -> None:
        self._offset = settings.stored_zeros_offset
        self._varies = settings.varies

    def bits(self, layer: QuantisedLayer) -> int:
        _, outputs = layer.matrix("qweight")
        _, words = layer.matrix("qzeros")
        found = words * _WORD_BITS // outputs
        if self._varies and found in _READ_BITS:
            return found
        return _check_bits(layer, found)

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        words, outputs = layer.matrix("qweight")
        layer.slot("scales")
        bits = self.bits(layer)
        columns = words * _WORD_BITS // bits
        groups, scaled = self._grid(layer, (outputs, columns))
        if layer.slot("qzeros").shape != (groups, -(-outputs * bits // _WORD_BITS)):
            raise layer.misfit("qzeros", f"scales has shape {[groups, scaled]}")
        return outputs, columns

    def _grid(self, layer: QuantisedLayer, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales, [groups, out]."""
        outputs, columns = shape
        scales = layer.slot("scales").shape
        expected = f"the weight has shape {[outputs, columns]}"
        if len(scales) != 2 or scales[1] != outputs:
            raise layer.misfit("scales", expected)
        if layer.has("g_idx"):
            if layer.slot("g_idx").shape != (columns,):
                raise layer.misfit("g_idx", expected)
        elif _groups(columns, scales[0], self._size(layer)) is None:
            raise layer.misfit("scales", expected)
        return scales[0], scales[1]

    def _size(self, layer: QuantisedLayer) -> int | None:
        return None if self._varies else layer.scheme.group_size

    def zeros(self, layer: QuantisedLayer) -> Zeros:
        bits = self.bits(layer)
        outputs = layer.matrix("qweight")[1]
        stored = unpack(layer.array("qzeros").array, bits)[:, :outputs].T
        numbers = (stored.astype(np.int16) + self._offset) & (2**bits - 1)
        return Zeros(numbers, 1 << (bits - 1))

    def read(self, layer: QuantisedLayer) -> Integers:
        numbers = unpack(layer.array("qweight").array.T, self.bits(layer))
        return Integers(numbers, self.zeros(layer).numbers, self.scales(layer), self.groups(layer))

    def scales(self, layer: QuantisedLayer) -> np.ndarray:
        return to_float32(layer.array("scales")).T

    def groups(self, layer: QuantisedLayer) -> np.ndarray:
        if layer.has("g_idx"):
            return layer.array("g_idx").array.astype(np.int64)
        _, columns = self.shape(layer)
        group = _groups(columns, layer.slot("scales").shape[0], self._size(layer))
        assert group is not None, "`shape` has checked it"
        return group


class _Awq:
    """AWQ's layout of GEMM, always 4 bits."""

    def bits(self, layer: QuantisedLayer) -> int:
        if layer.scheme.bits not in (None, 4):
            raise unread(layer.label, f"{layer.method}, {layer.scheme.bits} bits")
        return 4

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        columns, words = layer.matrix("qweight")
        outputs = words * 8
        self.bits(layer)
        layer.slot("qzeros")
        groups, scaled = layer.matrix("scales")
        if scaled != outputs or _groups(columns, groups, layer.scheme.group_size) is None:
            raise layer.misfit("scales", f"the weight has shape {[outputs, columns]}")
        if layer.slot("qzeros").shape != (groups, words):
            raise layer.misfit("qzeros", f"scales has shape {[groups, scaled]}")
        return outputs, columns

    def zeros(self, layer: QuantisedLayer) -> Zeros:
        return Zeros(self._ordered(layer, "qzeros").T.astype(np.int16), 8)

    def read(self, layer: QuantisedLayer) -> Integers:
        numbers = np.ascontiguousarray(self._ordered(layer, "qweight").T)
        return Integers(numbers, self.zeros(layer).numbers, self.scales(layer), self.groups(layer))

    def scales(self, layer: QuantisedLayer) -> np.ndarray:
        return to_float32(layer.array("scales")).T

    def groups(self, layer: QuantisedLayer) -> np.ndarray:
        columns, _ = layer.matrix("qweight")
        group = _groups(columns, layer.slot("scales").shape[0], layer.scheme.group_size)
        assert group is not None, "`shape` has checked it"
        return group

    def _ordered(self, layer: QuantisedLayer, kind: str) -> np.ndarray:
        numbers = unpack(layer.array(kind).array, 4)
        return numbers.reshape(len(numbers), -1, 8)[..., _AWQ_ORDER].reshape(len(numbers), -1)


class _Packed:
    """The packed layout of compressed-tensors."""

    def bits(self, layer: QuantisedLayer) -> int:
        _, words = layer.matrix("weight_packed")
        declared = layer.scheme.bits
        if not layer.has("weight_shape"):
            return _check_bits(layer, declared or 0)
        columns = int(layer.array("weight_shape").array[-1])
        fitting = [bits for bits in _READ_BITS if -(-columns * bits // _WORD_BITS) == words]
        found = declared if declared in fitting else (fitting or [0])[0]
        return _check_bits(layer, found or 0)

    def shape(self, layer: QuantisedLayer) -> tuple[int, int]:
        if layer.slot("weight_packed").dtype != "I32":
            raise unread(layer.label, f"{layer.method}, weights of 4-bit floats")
        rows, words = layer.matrix("weight_packed")
        layer.slot("weight_scale")
        columns = words * _WORD_BITS // self.bits(layer)
        if layer.has("weight_shape"):
            columns = int(layer.array("weight_shape").array[-1])
        self._grid(layer, (rows, columns))
        return rows, columns

    def _grid(self, layer: QuantisedLayer, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of the scales."""
        rows, columns = shape
        scales = layer.slot("weight_scale").shape
        expected = f"the weight has shape {[rows, columns]}"
        tall, wide = (*scales, 1, 1)[:2]
        if len(scales) > 2 or tall not in (1, rows):
            raise layer.misfit("weight_scale", expected)
        if layer.has("weight_g_idx"):
            if layer.slot("weight_g_idx").shape != (columns,):
                raise layer.misfit("weight_g_idx", expected)
        elif _groups(columns, wide, layer.scheme.group_size) is None:
            raise layer.misfit("weight_scale", expected)
        if layer.has("weight_zero_point"):
            self._check_zeros(layer, (tall, wide))
        return tall, wide

    def _check_zeros(self, layer: QuantisedLayer, grid: tuple[int, int]) -> None:
        slot = layer.slot("weight_zero_point")
        tall, wide = grid
        packed = (-(-tall * self.bits(layer) // _WORD_BITS), wide)
        if (*slot.shape, 1, 1)[:2] != (packed if slot.dtype == "I32" else grid):
            raise layer.misfit("weight_zero_point", f"weight_scale has shape {[tall, wide]}")

    def zeros(self, layer: QuantisedLayer) -> Zeros:
        bits = self.bits(layer)
        centre = 1 << (bits - 1)
        tall, wide = (*layer.slot("weight_scale").shape, 1, 1)[:2]
        if not layer.has("weight_zero_point"):
            return Zeros(np.full((tall, wide), centre, dtype=np.int16), centre)
        code, stored = layer.array("weight_zero_point")
        if code == "I32":
            numbers = unpack(stored.T, bits).T[:tall].astype(np.int16)
        else:  # signed, as the numbers are before they are packed
            numbers = stored.reshape(tall, wide).astype(np.int16) + centre
        return Zeros(numbers, centre)

    def read(self, layer: QuantisedLayer) -> Integers:
        rows, columns = self.shape(layer)
        numbers = unpack(layer.array("weight_packed").array, self.bits(layer))[:, :columns]
        scales = self.scales(layer)
        zeros = self.zeros(layer).numbers
        if len(zeros) < rows:
            zeros = np.repeat(zeros, rows, axis=0)
        return Integers(np.ascontiguousarray(numbers), zeros, scales, self.groups(layer))

    def scales(self, layer: QuantisedLayer) -> np.ndarray:
        shape = self.shape(layer)
        tall, wide = self._grid(layer, shape)
        scales = to_float32(layer.array("weight_scale")).reshape(tall, wide)
        return np.repeat(scales, shape[0], axis=0) if tall < shape[0] else scales

    def groups(self, layer: QuantisedLayer) -> np.ndarray:
        shape = self.shape(layer)
        if layer.has("weight_g_idx"):
            index = layer.array("weight_g_idx").array.astype(np.int64)
            if (index >= 0).all():
                return index
        group = _groups(shape[1], self._grid(layer, shape)[1], layer.scheme.group_size)
        assert group is not None, "`shape` has checked it"
        return group


def integer_layouts(settings: QuantisationSettings) -> dict[str, IntegerLayout]:
    """Return the layouts of a checkpoint, by the tensor that holds the numbers."""
    words = _Awq() if settings.layout == "awq" else _Gptq(settings)
    return {
        kind: IntegerLayout(
            layout.shape, layout.bits, layout.zeros, layout.scales, layout.groups, layout.read
        )
        for kind, layout in (("qweight", words), ("weight_packed", _Packed()))
    }
