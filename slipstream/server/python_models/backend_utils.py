"""The contents of `triton_python_backend_utils`, which a `model.py` imports as pb_utils."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.server.python_models.backend_config import ModelConfig
from slipstream.server.python_models.backend_requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ResponseSender,
)
from slipstream.server.python_models.backend_tensors import (
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
    numpy_to_triton_type,
)
from slipstream.server.python_models.channel import Channel
from slipstream.server.python_models.frames import (
    ControlAnswer,
    Log,
    MetricFamilyFrame,
    MetricFrame,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_NUMBERED_TYPES = dict(enumerate(TRITON_STRING_TO_NUMPY.values(), start=1))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return _tensor_by_name(request.inputs(), name)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return _tensor_by_name(response.output_tensors(), name)


def _tensor_by_name(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    for tensor in tensors:
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return _config_by_name(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return _config_by_name(model_config, "output", name)


def _config_by_name(model_config: Mapping[str, Any], group: str, name: str) -> Any:
    return next(
        (tensor for tensor in model_config.get(group, ()) if tensor.get("name") == name), None
    )


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the NumPy type by the number of the protocol's enumeration."""
    return _NUMBERED_TYPES[data_type]


def get_model_dir() -> str:
    """Return the version folder of this model."""
    model = sys.modules.get("model")
    return str(Path(model.__file__).parent) if model is not None and model.__file__ else ""


class Logger:
    """Writes to the server's log."""

    INFO = "I"
    WARNING = "W"
    ERROR = "E"
    VERBOSE = "V"

    @staticmethod
    def log(message: str, level: str = "I") -> None:
        _log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        _log("I", message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log("W", message)

    @staticmethod
    def log_error(message: str) -> None:
        _log("E", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log("V", message)


def _log(level: str, message: str) -> None:
    caller = sys._getframe(2)
    place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    Channel.current().send(Log(level, str(message), place))


def _value_or_raise(answer: ControlAnswer) -> float:
    if answer.error is not None:
        raise TritonModelException(answer.error.message)
    return answer.value


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(
        _value_or_raise(Channel.current().control("ready", model_name, version=model_version))
    )


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; `files` override those of the repository, by `file:` paths."""
    contents = {
        name.removeprefix("file:"): bytes(content) for name, content in (files or {}).items()
    }
    _value_or_raise(Channel.current().control("load", model_name, config=config, files=contents))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    _value_or_raise(
        Channel.current().control("unload", model_name, unload_dependents=unload_dependents)
    )


class Metric:
    """One sample or histogram of a family."""

    def __init__(
        self, family: str, kind: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._family = family
        self._kind = kind
        self._labels = dict(labels)
        self._send("create", buckets=tuple(float(bound) for bound in buckets))

    def increment(self, value: float) -> None:
        if self._kind == "histogram" or (self._kind == "counter" and value < 0):
            raise TritonModelException(f"a {self._kind} cannot be incremented by {value}")
        self._send("increment", value)

    def set(self, value: float) -> None:
        if self._kind != "gauge":
            raise TritonModelException(f"a {self._kind} cannot be set")
        self._send("set", value)

    def observe(self, value: float) -> None:
        if self._kind != "histogram":
            raise TritonModelException(f"a {self._kind} cannot observe")
        self._send("observe", value)

    def value(self) -> float:
        if self._kind == "histogram":
            raise TritonModelException("a histogram has no single value")
        return _value_or_raise(
            Channel.current().control("metric", self._family, labels=self._labels)
        )

    def _send(self, action: str, value: float = 0.0, buckets: tuple[float, ...] = ()) -> None:
        Channel.current().send(
            MetricFrame(self._family, self._labels, action, float(value), buckets)
        )


class MetricFamily:
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name
        self._kind = kind
        Channel.current().send(MetricFamilyFrame(name, description, kind))

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = ()
    ) -> Metric:
        return Metric(self._name, self._kind, labels or {}, buckets)
