"""Converts gRPC messages to requests of tensors, and responses to messages.

The checks are Triton's, in its order and with its texts. Data comes raw in the order of the inputs,
as typed contents, or from shared memory; responses are raw, or go into shared memory.
kserve/input_checks.py and kserve/tensor_bytes.py decode raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from slipstream.repository.config import ModelConfig
from slipstream.server.grpc.protocol import messages
from slipstream.server.kserve.call import InferCall, SharedPlace, WantedOutput
from slipstream.server.kserve.classification import classify
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, Parameter
from slipstream.server.kserve.input_checks import check_request, request_error, tensor_without_data
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import Buffer, as_buffer, pack
from slipstream.server.kserve.tensors import DTYPES, Array, Tensor

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

# The field of InferTensorContents that carries each datatype.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# The datatype of each field, as error texts name it.
_FIELD_TYPES = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def read_call(message: Any, config: ModelConfig, version: str, memory: SharedMemory) -> InferCall:
    """Return the call of a ModelInferRequest. Raises InferenceError."""
    request = InferRequest(config.name, version, {}, id=message.id)
    for name, parameter in message.parameters.items():
        _read_parameter(request, name, parameter)
    call = InferCall(request, [_wanted(output) for output in message.outputs])
    request.outputs = tuple(output.name for output in call.outputs)
    raw: dict[str, Buffer] = {}
    in_message = 0  # inputs in shared memory have no raw contents
    for given in message.inputs:
        name = given.name
        if name in request.inputs:
            raise request_error(request, f"input '{name}' already exists in request")
        tensor = tensor_without_data(name, given.datatype, tuple(given.shape))
        if (place := _place(given.parameters)) is not None:
            raw[name] = memory.read(place.region, place.offset, place.byte_size)
        elif given.HasField("contents") and not message.raw_input_contents:
            tensor.data = _explicit(given, config)
        else:
            raw[name] = _raw_contents(message, in_message, name)
            in_message += 1
        request.inputs[name] = tensor
    check_request(request, config, raw)
    for tensor in request.inputs.values():
        _check_filled(request, tensor)
    return call


def _read_parameter(request: InferRequest, name: str, parameter: Any) -> None:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InferenceError(f"parameter '{name}' has no value")
    value = getattr(parameter, choice)
    if name == EMPTY_FINAL:
        return  # read where the responses are written
    if name.startswith("triton_"):
        raise InferenceError(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
        )
    expected = _RESERVED.get(name)
    if expected is None:
        request.parameters[name] = value
    elif choice not in expected.choices:
        raise InferenceError(
            f"invalid value type for '{name}' parameter, expected {expected.text}."
        )
    else:
        setattr(request, expected.field, value)


def wants_empty_final(message: Any) -> bool:
    return EMPTY_FINAL in message.parameters and bool(message.parameters[EMPTY_FINAL].bool_param)


class _Reserved:
    """A parameter that is a field of the request."""

    def __init__(self, field: str, *choices: str) -> None:
        self.field = field
        self.choices = choices
        self.text = " or ".join(choices)


_RESERVED = {
    "sequence_id": _Reserved("sequence_id", "int64_param", "uint64_param", "string_param"),
    "sequence_start": _Reserved("sequence_start", "bool_param"),
    "sequence_end": _Reserved("sequence_end", "bool_param"),
    "priority": _Reserved("priority", "int64_param", "uint64_param"),
    "timeout": _Reserved("timeout_microseconds", "int64_param", "uint64_param"),
}


def _wanted(output: Any) -> WantedOutput:
    classes = _integer(output.parameters, "classification")
    return WantedOutput(output.name, classes=classes, place=_place(output.parameters))


def _place(parameters: Any) -> SharedPlace | None:
    if "shared_memory_region" not in parameters:
        return None
    if "shared_memory_byte_size" not in parameters:
        raise InferenceError("'shared_memory_byte_size' must be given with 'shared_memory_region'")
    return SharedPlace(
        parameters["shared_memory_region"].string_param,
        _integer(parameters, "shared_memory_offset"),
        _integer(parameters, "shared_memory_byte_size"),
    )


def _integer(parameters: Any, name: str) -> int:
    return int(parameters[name].int64_param) if name in parameters else 0


def _raw_contents(message: Any, position: int, name: str) -> bytes:
    if position >= len(message.raw_input_contents):
        raise InferenceError(
            f"unable to find data for input tensor '{name}' for model '{message.model_name}' "
            "in request."
        )
    return bytes(message.raw_input_contents[position])


def _explicit(given: Any, config: ModelConfig) -> Array | list[bytes]:
    """Return the values of the typed field; none for a datatype that the next check refuses."""
    expected = _CONTENTS.get(given.datatype)
    for field, _ in given.contents.ListFields():
        if field.name != expected:
            raise InferenceError(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model "
                f"'{config.name}' of type '{_FIELD_TYPES[field.name]}', expected datatype "
                f"'{given.datatype}'"
            )
    if expected is None:
        return []
    values = getattr(given.contents, expected)
    if given.datatype == "BYTES":
        return list(values)
    numbers = np.array(values, DTYPES[_FIELD_TYPES[expected]])
    narrow = numbers.astype(DTYPES[given.datatype], copy=False)
    if not np.array_equal(narrow, numbers):  # the wire has no fields of 8 and 16 bits
        raise InferenceError(
            f"input tensor '{given.name}' for model '{config.name}' holds values that "
            f"{given.datatype} cannot"
        )
    return narrow


def _check_filled(request: InferRequest, tensor: Tensor) -> None:
    if prod(tensor.shape) != len(tensor.data) or any(dim < 0 for dim in tensor.shape):
        place = f"for input '{tensor.name}' for model '{request.model_name}'"
        shape = "[" + ",".join(str(dim) for dim in tensor.shape) + "]"
        raise request_error(
            request, f"{len(tensor.data)} values {place} do not fill its shape {shape}"
        )


def write_response(
    call: InferCall,
    name: str,
    version: str,
    response: InferResponse,
    config: ModelConfig,
    memory: SharedMemory,
) -> Any:
    """Return the ModelInferResponse with the outputs that were asked for, all if none was named."""
    message = messages.ModelInferResponse(
        model_name=name, model_version=version, id=call.request.id
    )
    set_parameters(message, response.parameters.items())
    for tensor in response.outputs:
        wanted = call.wanted(tensor.name)
        if wanted is None:
            continue
        if wanted.classes:
            tensor = classify(tensor, wanted.classes, config)
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if wanted.place is None:
            message.raw_output_contents.append(pack(tensor))
        else:
            _write_shared(output, tensor, wanted.place, memory)
    return message


def _write_shared(output: Any, tensor: Tensor, place: SharedPlace, memory: SharedMemory) -> None:
    data = as_buffer(tensor)
    memory.write(place.region, place.offset, place.byte_size, data, tensor.name)
    set_parameters(
        output, [("shared_memory_region", place.region), ("shared_memory_byte_size", len(data))]
    )
    if place.offset:
        set_parameters(output, [("shared_memory_offset", place.offset)])


def set_parameters(message: Any, parameters: Iterable[tuple[str, Parameter]]) -> None:
    for name, value in parameters:
        field = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(
            type(value), "string_param"
        )
        setattr(message.parameters[name], field, value)
