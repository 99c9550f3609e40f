"""Tensors, errors and responses of a `model.py`. Part of `triton_python_backend_utils`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.server.python_models.frames import (
    ErrorFrame,
    ResponseFrame,
    TensorFrame,
    numbers_to_data,
)

NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
WIRE_TYPES = {np.dtype(numpy_type): name for name, numpy_type in NUMPY_TYPES.items()}


class TritonModelException(Exception):
    """An error that a model raises to fail a request, and that this module raises."""


# the name in tracebacks that models send as errors
TritonModelException.__module__ = "c_python_backend_utils"


class TritonError:
    """The error of a response."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code

    def __str__(self) -> str:
        return self._message


def numpy_to_triton_type(numpy_type: Any) -> str:
    """Return Triton's name of a NumPy type."""
    given = numpy_type if isinstance(numpy_type, np.dtype) else np.dtype(numpy_type)
    if given.kind == "S":  # fixed-width bytes
        return "BYTES"
    if given not in WIRE_TYPES:
        raise TritonModelException("NumPy dtype is not supported.")
    return WIRE_TYPES[given]


class _Capsule:
    """Wraps a bare DLPack capsule in the interface that `numpy.from_dlpack` expects."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the CPU


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor takes a name and a numpy.ndarray, not {type(array).__name__}")
        self._name = name
        self._datatype = numpy_to_triton_type(array.dtype)
        self._array: np.ndarray[Any, Any] | None = array
        self._frame: TensorFrame | None = None

    @classmethod
    def from_frame(cls, frame: TensorFrame) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._name = frame.name
        tensor._datatype = frame.datatype
        tensor._array = None
        tensor._frame = frame
        return tensor

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Return a tensor of a DLPack capsule or an object that exports one, in CPU memory."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        if source.__dlpack_device__()[0] not in (1, 3):  # plain or pinned memory
            raise TritonModelException(
                "DLPack tensors must be in the CPU's memory; copy the tensor there first"
            )
        return Tensor(name, np.from_dlpack(source))

    def name(self) -> str:
        return self._name

    def triton_dtype(self) -> str:
        return self._datatype

    def is_cpu(self) -> bool:
        return True

    def shape(self) -> list[int]:
        return list(self._array.shape if self._array is not None else self._require_frame().shape)

    def as_numpy(self) -> np.ndarray[Any, Any]:
        if self._array is None:
            self._array = _array(self._require_frame())
        return self._array

    def to_dlpack(self) -> Any:
        return self.as_numpy().__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.as_numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def frame(self) -> TensorFrame:
        """Return the frame of the tensor: of the array if there is one, which may have changed."""
        if self._array is None:
            return self._require_frame()
        return TensorFrame(
            self._name, self._datatype, self._array.shape, _data(self._array, self._datatype)
        )

    def _require_frame(self) -> TensorFrame:
        assert self._frame is not None
        return self._frame


def _array(frame: TensorFrame) -> np.ndarray[Any, Any]:
    if frame.datatype not in NUMPY_TYPES:
        raise TritonModelException(
            f"NumPy has no type for the {frame.datatype} tensor '{frame.name}'"
        )
    if isinstance(frame.data, list):
        items = np.empty(len(frame.data), dtype=np.object_)
        items[:] = frame.data
        return items if len(frame.shape) == 1 else items.reshape(frame.shape)
    numbers = frame.numbers()
    # Models write to their inputs. A large tensor is a view of memory that only it uses; small ones
    # are bytes, which are read-only.
    writable = numbers if isinstance(numbers, memoryview) else bytearray(numbers)
    return np.frombuffer(writable, NUMPY_TYPES[frame.datatype]).reshape(frame.shape)


def _data(array: np.ndarray[Any, Any], datatype: str) -> bytes | list[bytes] | int:
    if datatype == "BYTES":
        return [item if type(item) is bytes else _item(item) for item in array.ravel().tolist()]
    return numbers_to_data(array)


def _item(item: Any) -> bytes:
    if isinstance(item, bytes):
        return bytes(item)
    return (item if isinstance(item, str) else str(item)).encode()


class InferenceResponse:
    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: str | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise TypeError("output_tensors of an InferenceResponse must be Tensor objects")
        self._error = error
        self._parameters = parameters or "{}"

    @classmethod
    def from_frame(cls, frame: ResponseFrame) -> InferenceResponse:
        error = None if frame.error is None else TritonError(frame.error.message, frame.error.code)
        return cls(
            [Tensor.from_frame(tensor) for tensor in frame.outputs],
            error,
            json.dumps(frame.parameters),
        )

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return self._parameters

    def frame(self) -> ResponseFrame:
        if self._error is not None:
            return ResponseFrame([], ErrorFrame(self._error.message(), self._error.code()))
        parameters = {} if self._parameters == "{}" else json.loads(self._parameters)
        return ResponseFrame([tensor.frame() for tensor in self._outputs], None, parameters)
