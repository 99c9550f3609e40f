"""Converts tensors, requests and responses to the frames of a model's process, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import msgspec

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, Parameter
from slipstream.server.kserve.tensor_bytes import SIZES, unpack
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.python_models.frames import (
    ErrorFrame,
    RequestFrame,
    ResponseFrame,
    TensorFrame,
    numbers_to_data,
)

_PARAMETERS = msgspec.json.Decoder(dict[str, str | int | float | bool])
_WRITER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

# Flags of a request of a sequence.
_START = 1
_END = 2


def tensor_frame(tensor: Tensor) -> TensorFrame:
    data = tensor.data if isinstance(tensor.data, list) else numbers_to_data(tensor.data)
    return TensorFrame(tensor.name, tensor.datatype, tensor.shape, data)


def tensor_from_frame(frame: TensorFrame) -> Tensor:
    """Return the tensor of a frame; its numbers are a view of the frame's bytes."""
    if isinstance(frame.data, list):
        if frame.datatype != "BYTES":
            raise _damaged(frame)
        return Tensor(frame.name, frame.datatype, frame.shape, frame.data)
    if frame.datatype not in SIZES:
        raise InferenceError(
            f"a Python model sent the unknown datatype '{frame.datatype}'", Code.INTERNAL
        )
    numbers = frame.numbers()
    if len(numbers) != prod(frame.shape) * SIZES[frame.datatype]:
        raise _damaged(frame)
    return Tensor(frame.name, frame.datatype, frame.shape, unpack(frame.datatype, numbers))


def _damaged(frame: TensorFrame) -> InferenceError:
    text = f"a Python model sent data that does not fit the shape of tensor '{frame.name}'"
    return InferenceError(text, Code.INTERNAL)


def request_frame(number: int, request: InferRequest) -> RequestFrame:
    trace = request.times.trace
    return RequestFrame(
        number=number,
        id=_valid(request.id),
        correlation_id=_correlation_id(request.sequence_id),
        flags=_START * request.sequence_start | _END * request.sequence_end,
        timeout=request.timeout_microseconds,
        parameters=_valid(_WRITER.encode(request.parameters)) if request.parameters else "{}",
        requested_outputs=request.outputs,
        inputs=[tensor_frame(tensor) for tensor in request.inputs.values()],
        trace=number if trace is not None else 0,
        trace_context=trace.context if trace is not None else "",
    )


def _valid(text: str) -> str:
    """Return the text without bytes that are not UTF-8, which an HTTP client may send."""
    return (
        text
        if text.isascii()
        else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def _correlation_id(identity: int | str) -> int | str:
    return _valid(identity) if isinstance(identity, str) else identity


def request_from_frame(frame: RequestFrame, model_name: str, model_version: str) -> InferRequest:
    """Return a request that a model makes to another."""
    try:
        parameters: dict[str, Parameter] = _PARAMETERS.decode(frame.parameters)
    except msgspec.MsgspecError as error:
        raise InferenceError(
            f"parameters must be a JSON object of strings, numbers and booleans: {error}"
        ) from error
    return InferRequest(
        model_name,
        model_version,
        {tensor.name: tensor_from_frame(tensor) for tensor in frame.inputs},
        id=frame.id,
        parameters=parameters,
        outputs=frame.requested_outputs,
        timeout_microseconds=frame.timeout,
        sequence_id=frame.correlation_id,
        sequence_start=bool(frame.flags & _START),
        sequence_end=bool(frame.flags & _END),
    )


def response_from_frame(frame: ResponseFrame, final: bool) -> InferResponse:
    if frame.error is not None:
        code = Code.__members__.get(frame.error.code, Code.INTERNAL)
        return InferResponse(error=InferenceError(frame.error.message, code), final=final)
    return InferResponse(
        [tensor_from_frame(tensor) for tensor in frame.outputs], frame.parameters, final=final
    )


def response_frame(response: InferResponse, wanted: Sequence[str]) -> ResponseFrame:
    """Return another model's response with the outputs that were asked for, all if none was."""
    if response.error is not None:
        return error_frame(response.error)
    outputs = [
        tensor_frame(tensor) for tensor in response.outputs if not wanted or tensor.name in wanted
    ]
    return ResponseFrame(outputs, None, dict(response.parameters))


def error_frame(error: InferenceError) -> ResponseFrame:
    return ResponseFrame([], ErrorFrame(error.message, error.code.name))
