"""gRPC messages to requests of tensors, and answers back to messages.

What the real server checks is checked here, in its order and with its words. Data comes either raw, in the
order of the inputs, or as typed contents; answers are always raw.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import prod
from typing import Any

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.errors import InferenceError
from slipstream.server.generate_request import check_inputs, refused
from slipstream.server.inference import InferRequest, InferResponse, Parameter
from slipstream.server.protocol import messages
from slipstream.server.tensors import Tensor

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H",
    "UINT32": "I", "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d", "BF16": "H",
}  # fmt: skip
# The field that carries each datatype, and the datatype a filled field stands for in an error text.
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
_FIELD_TYPES = {
    "bool_contents": "BOOL", "int_contents": "INT32", "int64_contents": "INT64", "uint_contents": "UINT32",
    "uint64_contents": "UINT64", "fp32_contents": "FP32", "fp64_contents": "FP64", "bytes_contents": "BYTES",
}  # fmt: skip


def read_request(message: Any, config: ModelConfig, version: str) -> InferRequest:
    """A ModelInferRequest as the model may see it. Raises InferenceError."""
    request = InferRequest(config.name, version, {}, id=message.id, parameters=_parameters(message))
    _check_outputs(message, config)
    for position, given in enumerate(message.inputs):
        if given.name in request.inputs:
            raise refused(request, f"input '{given.name}' already exists in request")
        data = _data(message, position, config, request)
        request.inputs[given.name] = Tensor(given.name, given.datatype, tuple(given.shape), data)
    check_inputs(request, config)
    known = {tensor.name: tensor for tensor in config.inputs}
    for tensor in request.inputs.values():
        if tensor.name not in known:
            raise InferenceError(f"unexpected inference input '{tensor.name}' for model '{config.name}'")
        _check_tensor(request, tensor, known[tensor.name], config)
    return request


def _parameters(message: Any) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, parameter in message.parameters.items():
        if name.startswith("triton_") and name != EMPTY_FINAL:
            raise InferenceError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InferenceError(f"parameter '{name}' has no value")
        parameters[name] = getattr(parameter, choice)
    return parameters


def _check_outputs(message: Any, config: ModelConfig) -> None:
    for wanted in message.outputs:
        if wanted.name not in config.output_names:
            raise InferenceError(f"unexpected inference output '{wanted.name}' for model '{config.name}'")


def _data(message: Any, position: int, config: ModelConfig, request: InferRequest) -> list[Any]:
    given = message.inputs[position]
    if given.HasField("contents") and not message.raw_input_contents:
        return _explicit(given, config)
    if position >= len(message.raw_input_contents):
        text = f"unable to find data for input tensor '{given.name}' for model '{config.name}' in request."
        raise InferenceError(text)
    raw, count = message.raw_input_contents[position], prod(given.shape)
    if given.datatype == "BYTES":
        items = _split_bytes(raw, given.name, config, request)
        if len(items) != count:
            place = f"for inference input '{given.name}' for model '{config.name}'"
            raise refused(request, f"expected {count} string elements {place}, got {len(items)}")
        return items
    code = _CODES.get(given.datatype)
    if code is None:
        return []  # an unknown datatype; the check against the model's tells
    expected = count * struct.calcsize(code)
    if count < 0 or len(raw) != expected:
        place = f"for input '{given.name}' for model '{config.name}'"
        raise refused(request, f"input byte size mismatch {place}. Expected {expected}, got {len(raw)}")
    return list(struct.unpack(f"<{count}{code}", raw))


def _explicit(given: Any, config: ModelConfig) -> list[Any]:
    filled = [field.name for field, _ in given.contents.ListFields()]
    expected = _CONTENTS.get(given.datatype)
    for name in filled:
        if name != expected:
            raise InferenceError(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{config.name}' of "
                f"type '{_FIELD_TYPES[name]}', expected datatype '{given.datatype}'"
            )
    return list(getattr(given.contents, expected)) if expected else []


def _split_bytes(raw: bytes, name: str, config: ModelConfig, request: InferRequest) -> list[bytes]:
    items, position = [], 0
    while position < len(raw):
        start = position + 4
        length = int.from_bytes(raw[position:start], "little")
        position = start + length
        if position > len(raw):
            place = f"for inference input '{name}' for model '{config.name}'"
            raise refused(request, f"incomplete string data {place}, expecting string of length {length}")
        items.append(raw[start:position])
    return items


def _check_tensor(request: InferRequest, tensor: Tensor, expected: TensorConfig, config: ModelConfig) -> None:
    if tensor.datatype != expected.datatype:
        given = tensor.datatype if tensor.datatype in _CODES or tensor.datatype == "BYTES" else "<invalid>"
        kinds = f"data-type is '{given}', but model '{config.name}' expects '{expected.datatype}'"
        raise refused(request, f"inference input '{tensor.name}' {kinds}")
    if prod(tensor.shape) != len(tensor.data):
        place = f"for input '{tensor.name}' for model '{config.name}'"
        raise refused(request, f"{len(tensor.data)} values {place} do not fill its shape {_shape(tensor.shape)}")
    wanted = ((-1,) if config.max_batch_size > 0 else ()) + expected.dims
    fits = len(wanted) == len(tensor.shape) and all(
        dim in (-1, given) for dim, given in zip(wanted, tensor.shape, strict=True)
    )
    if not fits:
        shapes = f"Expected {_shape(wanted)}, got {_shape(tensor.shape)}."
        text = f"unexpected shape for input '{tensor.name}' for model '{config.name}'. {shapes}"
        raise refused(request, text + (_BATCH_NOTE if config.max_batch_size > 0 else ""))


_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def _shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in dims) + "]"


def write_response(request: Any, version: str, response: InferResponse) -> Any:
    """A ModelInferResponse to this ModelInferRequest, with the outputs it asked for (all when it named none)."""
    message = messages.ModelInferResponse(model_name=request.model_name, model_version=version, id=request.id)
    set_parameters(message, response.parameters.items())
    wanted = {output.name for output in request.outputs}
    for tensor in response.outputs:
        if not wanted or tensor.name in wanted:
            message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_output_contents.append(_raw(tensor))
    return message


def set_parameters(message: Any, parameters: Iterable[tuple[str, Parameter]]) -> None:
    for name, value in parameters:
        field = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(message.parameters[name], field, value)


def _raw(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(item)) + item for item in tensor.data)
    return struct.pack(f"<{len(tensor.data)}{_CODES[tensor.datatype]}", *tensor.data)
