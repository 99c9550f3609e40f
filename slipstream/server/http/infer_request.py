"""Reads the body of `/infer`: a JSON header, then the raw tensors in the order of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.call import InferCall, SharedPlace, WantedOutput
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, Parameter
from slipstream.server.kserve.input_checks import (
    check_member_count,
    check_request,
    decode,
    request_error,
    tensor_without_data,
)
from slipstream.server.kserve.long_json import LongArray
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import DATATYPES, SIZES, Buffer
from slipstream.server.kserve.tensors import (
    Array,
    Tensor,
    read_values,
    unreadable,
    values_to_data,
)
from slipstream.server.kserve.triton_json import Members, parse_json

Object = dict[str, Any]  # a JSON object

MAX_DIMENSIONS = 64
_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
_RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
    "specified."
)
_NON_STRING = "attempt to access JSON non-string as string"
_NON_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


def read_infer_call(
    body: bytes, header_bytes: int | None, config: ModelConfig, version: str, memory: SharedMemory
) -> InferCall:
    """Return the call of a body. Its JSON takes `header_bytes`: None is all of it, 0 is none."""
    request = InferRequest(config.name, version, {})
    raw: dict[str, Buffer] = {}
    if header_bytes == 0:
        _read_bare(request, body, config)
        call = InferCall(request, binary_output=True)
    else:
        written = parse_json(body[:header_bytes])
        call = InferCall(request)
        document = written.first() if isinstance(written, Members) else {}
        if "id" in document:
            request.id = _string(document, "id")
        if "parameters" in document:
            _read_parameters(call, document["parameters"])
        binary = memoryview(b"" if header_bytes is None else body)[header_bytes:]
        raw = _read_inputs(request, document, binary, memory)
        if "outputs" in document:
            _read_outputs(call, document)
    check_request(request, config, raw)
    return call


def _read_bare(request: InferRequest, body: bytes, config: ModelConfig) -> None:
    """Read a body without a header: it is the input of a model that has only one."""
    if len(config.inputs) != 1:
        raise request_error(
            request,
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{config.name}' model configuration",
        )
    tensor = config.inputs[0]
    fixed = prod(dim for dim in tensor.dims if dim > 0)
    open_dims = sum(dim < 0 for dim in tensor.dims)
    batch = (1,) if config.max_batch_size > 0 else ()
    if tensor.datatype == "BYTES":
        if open_dims or fixed != 1:
            text = (
                f"For BYTE datatype raw input '{tensor.name}', the model must have input shape [1]"
            )
            raise request_error(request, text)
        request.inputs[tensor.name] = Tensor(tensor.name, "BYTES", (*batch, *tensor.dims), [body])
        return
    if open_dims > 1:
        raise request_error(
            request,
            f"The shape of the raw input '{tensor.name}' can not be deduced because there are "
            "more than one variable-sized dimension",
        )
    left = len(body) // (fixed * SIZES[tensor.datatype])
    shape = (*batch, *(dim if dim > 0 else left for dim in tensor.dims))
    given = tensor_without_data(tensor.name, tensor.datatype, shape)
    given.data = decode(request, given, body)
    request.inputs[tensor.name] = given


def _read_parameters(call: InferCall, parameters: Any) -> None:
    if not isinstance(parameters, Members):
        raise InferenceError(
            "failed to get request params.: attempt to get members for non-object", Code.INTERNAL
        )
    check_member_count(parameters)
    values = parameters.first()  # a repeated name has its first value each time
    for name, _ in parameters:
        _read_parameter(call, name, values[name])


def _read_parameter(call: InferCall, name: str, value: Any) -> None:
    request = call.request
    if name == "sequence_id":
        request.sequence_id = value if _is_unsigned(value) else _text(name, value)
    elif name == "sequence_start":
        request.sequence_start = _boolean(name, value)
    elif name == "sequence_end":
        request.sequence_end = _boolean(name, value)
    elif name == "priority":
        request.priority = _unsigned(name, value)
    elif name == "timeout":
        request.timeout_microseconds = _unsigned(name, value)
    elif name == "binary_data_output":
        call.binary_output = _boolean(name, value)
    elif name.startswith("triton_"):
        raise InferenceError(_RESERVED)
    else:
        request.parameters[name] = _parameter(name, value)


def _parameter(name: str, value: Any) -> Parameter:
    if not isinstance(value, (str, bool, int, float)):
        text = (
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
        raise InferenceError(text)
    return value


def _read_inputs(
    request: InferRequest, document: Object, binary: memoryview, memory: SharedMemory
) -> dict[str, Buffer]:
    """Add the inputs to the request; return the bytes of those that are not in the JSON."""
    raw: dict[str, Buffer] = {}
    position = 0
    for given in _objects(document, "inputs"):
        size, place = _sources(given)
        name = _string(given, "name")
        shape = _shape(given)
        datatype = _string(given, "datatype")
        if name in request.inputs:
            raise request_error(request, f"input '{name}' already exists in request")
        tensor = tensor_without_data(name, datatype, shape)
        if size is not None:
            piece = binary[position : position + size]
            if len(piece) < size:
                raise InferenceError(
                    f"unexpected size for input '{name}', expecting {size - len(piece)} "
                    f"additional bytes for model '{request.model_name}'"
                )
            position += size
            raw[name] = piece
        elif place is not None:
            raw[name] = memory.read(place.region, place.offset, place.byte_size)
        else:
            tensor.data = _read_json_values(tensor, given["data"])
        request.inputs[name] = tensor
    if position < len(binary):
        raise InferenceError(f"unexpected additional input data for model '{request.model_name}'")
    return raw


def _read_json_values(tensor: Tensor, value: Any) -> Array | list[bytes]:
    count = prod(tensor.shape) if tensor.shape else 0
    if not count and tensor.datatype in DATATYPES:  # Triton does not look at the data
        return values_to_data(tensor.datatype, [])
    if type(value) is not list and not isinstance(value, LongArray):
        raise unreadable("attempt to access JSON non-array as array")
    values = read_values(tensor.name, tensor.datatype, value)
    # for BYTES, the check of the model's inputs reports it
    if tensor.datatype != "BYTES" and len(values) != count:
        raise unreadable("Shape does not match true shape of 'data' field")
    return values


def _sources(given: Object) -> tuple[int | None, SharedPlace | None]:
    """Return where an input's data is: (bytes after the header, place in shared memory).

    Both are None where the JSON has the data.
    """
    if "data" in given and "parameters" not in given:
        return None, None
    parameters = _parameters(given)
    sized = "binary_data_size" in parameters
    shared = "shared_memory_region" in parameters
    count = sized + shared + ("data" in given)
    if count != 1:
        raise InferenceError(
            _ONE_SOURCE + ("no field is set" if count == 0 else "multiple fields are set")
        )
    if sized:
        return _unsigned("binary_data_size", parameters["binary_data_size"]), None
    return None, _place(parameters) if shared else None


def _parameters(given: Object) -> Object:
    parameters = given.get("parameters")
    return parameters.first() if isinstance(parameters, Members) else {}


def _place(parameters: Object) -> SharedPlace | None:
    if "shared_memory_region" not in parameters:
        return None
    region = _text("shared_memory_region", parameters["shared_memory_region"])
    offset = _unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0))
    size = _unsigned("shared_memory_byte_size", parameters.get("shared_memory_byte_size", 0))
    return SharedPlace(region, offset, size)


def _read_outputs(call: InferCall, document: Object) -> None:
    for given in _objects(document, "outputs"):
        parameters = _parameters(given)
        binary = parameters.get("binary_data", call.binary_output)
        classes = parameters.get("classification", 0)
        if not _is_unsigned(classes):
            raise InferenceError(f"Unable to set 'classification': {_NON_UNSIGNED}", Code.INTERNAL)
        call.outputs.append(
            WantedOutput(
                name=_string(given, "name"),
                binary=_boolean("binary_data", binary),
                classes=classes % 2**32,  # the type of the count in Triton
                place=_place(parameters),
            )
        )
    call.request.outputs = tuple(output.name for output in call.outputs)


def _missing(name: str) -> str:
    return f"attempt to access non-existing object member '{name}'"


def _wrong_member(given: Object, name: str, text: str) -> InferenceError:
    """Return the error for a member that is missing, or of the wrong type as `text` says."""
    problem = text if name in given else _missing(name)
    return InferenceError(f"Unable to parse '{name}': {problem}", Code.INTERNAL)


def _string(given: Object, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _wrong_member(given, name, _NON_STRING)
    return value


def _array(given: Object, name: str) -> list[Any]:
    value = given.get(name)
    if isinstance(value, LongArray):
        return value.head()
    if type(value) is not list:
        raise _wrong_member(given, name, "attempt to access JSON non-array as array")
    return value


def _objects(given: Object, name: str) -> Iterator[Object]:
    """Yield the objects of an array. An error in one is reported before the next is read."""
    for item in _array(given, name):
        # what is no object has no members
        yield item.first() if isinstance(item, Members) else {}


def _shape(given: Object) -> tuple[int, ...]:
    dims = _array(given, "shape")
    if len(dims) > MAX_DIMENSIONS:
        raise InferenceError(f"a shape has at most {MAX_DIMENSIONS} dimensions, got {len(dims)}")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < 2**63:
            raise _wrong_member(given, "shape", _NON_UNSIGNED)
    return tuple(dims)


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _unsigned(name: str, value: Any) -> int:
    if type(value) is int and 0 <= value < 2**64:
        return value
    raise InferenceError(f"Unable to parse '{name}': {_NON_UNSIGNED}", Code.INTERNAL)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InferenceError(f"Unable to parse '{name}': {_NON_STRING}", Code.INTERNAL)
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        text = f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean"
        raise InferenceError(text, Code.INTERNAL)
    return value
