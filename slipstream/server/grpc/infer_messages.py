"""Converts gRPC messages to requests of tensors, and responses to messages.

The checks are Triton's, in its order and with its texts. Data comes raw in the order of the inputs,
as typed contents, or from shared memory; responses are raw, or go into shared memory.
kserve/input_checks.py and kserve/tensor_bytes.py decode raw bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from slipstream.server.kserve.tensor_bytes import DATATYPES, Buffer, as_buffer, pack
from slipstream.server.kserve.tensors import DTYPES, Array, Tensor

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
_NUMBERS_AT_ONCE = 16384
_COPIED_AT_ONCE = 1 << 20  # bytes

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
        if given.parameters and (place := _place(given)) is not None:
            raw[name] = memory.read(place.region, place.offset, place.byte_size)
        elif given.HasField("contents"):
            if message.raw_input_contents:
                raise InferenceError(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{config.name}'"
                )
            _read_contents(tensor, given, raw, config)
        else:
            raw[name] = _raw_contents(message, in_message, name)
            in_message += 1
        request.inputs[name] = tensor
    check_request(request, config, raw)
    return call


def _read_parameter(request: InferRequest, name: str, parameter: Any) -> None:
    choice = parameter.WhichOneof("parameter_choice")
    if name == EMPTY_FINAL:  # read where the responses are written
        if choice != "bool_param":
            raise _wrong_type(name, "bool_param")
        return
    if name.startswith("triton_"):
        raise InferenceError(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
            f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
        )
    expected = _RESERVED.get(name)
    if expected is None:
        if choice is None:
            raise _wrong_type(name, "int64_param, bool_param, or string_param")
        request.parameters[name] = getattr(parameter, choice)
    elif choice not in expected.choices:
        raise _wrong_type(name, expected.text)
    elif name == "priority" and getattr(parameter, choice) < 0:
        raise InferenceError(f"invalid value for '{name}', expected value >= 0.")
    else:
        setattr(request, expected.field, getattr(parameter, choice))


def _wrong_type(name: str, expected: str) -> InferenceError:
    return InferenceError(f"invalid value type for '{name}' parameter, expected {expected}.")


def wants_empty_final(message: Any) -> bool:
    return EMPTY_FINAL in message.parameters and bool(message.parameters[EMPTY_FINAL].bool_param)


@dataclass(frozen=True)
class _Reserved:
    """A parameter that is a field of the request."""

    field: str
    choices: tuple[str, ...]
    text: str  # the types that Triton names: unsigned integers are accepted in addition


_INTEGERS = ("int64_param", "uint64_param")
_RESERVED = {
    "sequence_id": _Reserved(
        "sequence_id", (*_INTEGERS, "string_param"), "int64_param or string_param"
    ),
    "sequence_start": _Reserved("sequence_start", ("bool_param",), "bool_param"),
    "sequence_end": _Reserved("sequence_end", ("bool_param",), "bool_param"),
    "priority": _Reserved("priority", _INTEGERS, "int64_param or uint64_param"),
    "timeout": _Reserved("timeout_microseconds", _INTEGERS, "int64_param"),
}


def _wanted(output: Any) -> WantedOutput:
    if not output.parameters:
        return WantedOutput(output.name)
    place = _place(output)
    classes = 0
    if "classification" in output.parameters:
        parameter = output.parameters["classification"]
        if parameter.WhichOneof("parameter_choice") != "int64_param":
            raise InferenceError(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        if parameter.int64_param <= 0:
            raise InferenceError("invalid value for 'classification' parameter, expected >= 0")
        if place is not None:
            raise InferenceError(
                "output can't set both 'shared_memory_region' and 'classification'"
            )
        classes = parameter.int64_param % 2**32  # the type of the count in Triton
    return WantedOutput(output.name, classes=classes, place=place)


def _place(tensor: Any) -> SharedPlace | None:
    """Return the place of an input or output in shared memory."""
    parameters = tensor.parameters
    region = _tensor_parameter(tensor, "shared_memory_region", "string_param")
    for name in ("shared_memory_offset", "shared_memory_byte_size"):
        if region is None and name in parameters:
            raise InferenceError(
                f"'{name}' can not be specified without 'shared_memory_region' parameter for "
                f"tensor '{tensor.name}'"
            )
    if region is None:
        return None
    offset = _tensor_parameter(tensor, "shared_memory_offset", "int64_param")
    size = _tensor_parameter(tensor, "shared_memory_byte_size", "int64_param")
    if size is None:
        raise InferenceError(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor.name}'"
        )
    return SharedPlace(region, offset or 0, size)


def _tensor_parameter(tensor: Any, name: str, expected: str) -> Any:
    """Return the value of a tensor's parameter, None if it is not given."""
    if name not in tensor.parameters:
        return None
    parameter = tensor.parameters[name]
    if parameter.WhichOneof("parameter_choice") != expected:
        raise InferenceError(
            f"invalid value type for '{name}' parameter for tensor '{tensor.name}', expected "
            f"{expected}."
        )
    return getattr(parameter, expected)


def _raw_contents(message: Any, position: int, name: str) -> bytes:
    if position >= len(message.raw_input_contents):
        raise InferenceError(
            f"unable to find data for input tensor '{name}' for model '{message.model_name}' "
            "in request."
        )
    return bytes(message.raw_input_contents[position])


def _read_contents(tensor: Tensor, given: Any, raw: dict[str, Buffer], config: ModelConfig) -> None:
    """Read the typed field: strings to the tensor, numbers to `raw`, where their size is checked.

    There are none of a datatype that the next check refuses.
    """
    expected = _CONTENTS.get(given.datatype)
    for position, (field, _) in enumerate(given.contents.ListFields()):
        if position:
            raise InferenceError(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model "
                f"'{config.name}', binary data was already supplied."
            )
        if field.name != expected:
            datatype = given.datatype if given.datatype in DATATYPES else "<invalid>"
            raise InferenceError(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model "
                f"'{config.name}' of type '{_FIELD_TYPES[field.name]}', expected datatype "
                f"'{datatype}'"
            )
    if expected is None:
        raw[given.name] = b""
    elif given.datatype == "BYTES":
        tensor.data = list(given.contents.bytes_contents)
    else:
        values = getattr(given.contents, expected)
        numbers = np.empty(len(values), DTYPES[_FIELD_TYPES[expected]])
        for start in range(0, len(values), _NUMBERS_AT_ONCE):
            end = start + _NUMBERS_AT_ONCE
            numbers[start:end] = values[start:end]
        raw[given.name] = as_buffer(
            Tensor(given.name, given.datatype, (len(numbers),), _narrow(numbers, given, config))
        )


def _narrow(numbers: Array, given: Any, config: ModelConfig) -> Array:
    """Return the numbers in the type of the tensor: the wire has no fields of 8 and 16 bits."""
    narrow = numbers.astype(DTYPES[given.datatype], copy=False)
    if not np.array_equal(narrow, numbers):
        raise InferenceError(
            f"input tensor '{given.name}' for model '{config.name}' holds values that "
            f"{given.datatype} cannot"
        )
    return narrow


def write_response(
    call: InferCall,
    name: str,
    version: str,
    response: InferResponse,
    config: ModelConfig,
    memory: SharedMemory,
) -> Any:
    """Return the ModelInferResponse with the outputs that were asked for, all if none was named."""
    message, data = write_head(call, name, version, response, config, memory)
    message.raw_output_contents.extend(map(bytes, data))
    return message


def write_head(
    call: InferCall,
    name: str,
    version: str,
    response: InferResponse,
    config: ModelConfig,
    memory: SharedMemory,
) -> tuple[Any, list[Buffer]]:
    """Return the ModelInferResponse without the data of its outputs, and their data."""
    message = messages.ModelInferResponse(
        model_name=name, model_version=version, id=call.request.id
    )
    set_parameters(message, response.parameters.items())
    data: list[Buffer] = []
    for tensor in response.outputs:
        wanted = call.wanted(tensor.name)
        if wanted is None:
            continue
        if wanted.classes:
            tensor = classify(tensor, wanted.classes, config)
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if wanted.place is None:
            data.append(as_buffer(tensor))
        else:
            _write_shared(output, tensor, wanted.place, memory)
    return message, data


def encode_long(head: Any, data: Sequence[Buffer], streamed: bool) -> bytes:
    """Return an encoded ModelInferResponse, or the ModelStreamInferResponse with it.

    The data is copied once and in short pieces, so that other threads run in between.
    """
    written = io.BytesIO()
    first = bytes(head.SerializeToString())
    if streamed:
        fields = [len(_RAW) + len(_length(len(piece))) + len(piece) for piece in data]
        written.write(_INFER_RESPONSE + _length(len(first) + sum(fields)))
    written.write(first)
    for piece in data:
        written.write(_RAW + _length(len(piece)))
        view = memoryview(piece)
        for start in range(0, len(view), _COPIED_AT_ONCE):
            written.write(view[start : start + _COPIED_AT_ONCE])
    return written.getvalue()


class NextResponses:
    """Writes the responses of a stream in which the text alone changes, as most do.

    Everything else is encoded once, when the general way has written a response.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._others: Sequence[Tensor] = ()
        self._parameters: Mapping[str, Parameter] = {}
        # the encoded ModelInferResponse before and after the data of its first output
        self._before = b""
        self._after = b""

    def remember(self, call: InferCall, response: InferResponse, message: Any) -> None:
        """Take a response that is not the last one, with its message, as the pattern of others."""
        outputs = response.outputs
        named = [output.name for output in message.outputs]
        changed = any(wanted.classes or wanted.place for wanted in call.outputs)
        if changed or not named or named != [tensor.name for tensor in outputs]:
            return
        self._first = outputs[0]
        self._others = outputs[1:]
        self._parameters = response.parameters
        head = messages.ModelInferResponse()
        head.CopyFrom(message)
        head.ClearField("raw_output_contents")
        self._before = head.SerializeToString()
        self._after = b"".join([_RAW + _sized(pack(tensor)) for tensor in self._others])

    def write(self, response: InferResponse) -> bytes | None:
        """Return the encoded ModelStreamInferResponse; None where it does not fit the pattern."""
        outputs = response.outputs
        first = self._first
        if (
            first is None
            or response.error is not None
            or not outputs
            or outputs[1:] != self._others
            or outputs[0].shape != first.shape
            or outputs[0].name != first.name
            or response.parameters is not self._parameters
        ):
            return None
        body = self._before + _RAW + _sized(pack(outputs[0])) + self._after
        return _INFER_RESPONSE + _sized(body)


# the first bytes of two fields: their numbers, and that their lengths follow
_RAW = b"\x32"  # raw_output_contents of ModelInferResponse
_INFER_RESPONSE = b"\x12"  # infer_response of ModelStreamInferResponse


def _sized(data: bytes) -> bytes:
    """Return data with its length before it."""
    return _length(len(data)) + data


def _length(size: int) -> bytes:
    """Return a length as protobuf writes it: 7 bits in each byte."""
    length = bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length)


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
