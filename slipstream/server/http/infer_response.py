"""Writes the response of `/infer`: a JSON header, then the outputs in binary."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.call import InferCall, WantedOutput
from slipstream.server.kserve.classification import classify
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferResponse
from slipstream.server.kserve.json_writer import write_object, write_scalar, write_values
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import Buffer, as_buffer
from slipstream.server.kserve.tensors import Tensor


class InferBody(NamedTuple):
    header: bytes
    tensors: list[Buffer]  # the outputs in binary, none if all are in the header


def values_as_text(call: InferCall, response: InferResponse) -> int:
    """Return the number of values to write as JSON."""
    count = 0
    for tensor in response.outputs:
        wanted = call.wanted(tensor.name)
        if wanted is not None and not wanted.binary and wanted.place is None:
            count += len(tensor.data)
    return count


def write_infer_response(
    call: InferCall, response: InferResponse, config: ModelConfig, memory: SharedMemory
) -> InferBody:
    request = call.request
    fixed = b'{"id":' + write_scalar(request.id) + b"," if request.id else b"{"
    fixed += _model_members(request.model_name, request.model_version)
    if response.parameters:
        fixed += b',"parameters":' + write_object(response.parameters.items())
    outputs: list[bytes] = []
    pieces: list[Buffer] = []
    for tensor in response.outputs:
        wanted = call.wanted(tensor.name)
        if wanted is None:
            continue
        if wanted.classes:
            tensor = classify(tensor, wanted.classes, config)
        description, piece = _write_output(tensor, wanted, memory)
        outputs.append(description)
        if piece:
            pieces.append(piece)
    header = fixed + b',"outputs":[' + b",".join(outputs) + b"]}"
    return InferBody(header, pieces)


@lru_cache(maxsize=256)
def _model_members(name: str, version: str) -> bytes:
    return write_object([("model_name", name), ("model_version", version)])[1:-1]


@lru_cache(maxsize=256)
def _description(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of an output, which is the same for many responses."""
    return write_object([("name", name), ("datatype", datatype), ("shape", shape)])[:-1]


def _write_output(
    tensor: Tensor, wanted: WantedOutput, memory: SharedMemory
) -> tuple[bytes, Buffer]:
    """Return the output's JSON and its bytes after the header, which may be none."""
    description = _description(tensor.name, tensor.datatype, tuple(tensor.shape))
    if wanted.place is not None:
        place = wanted.place
        memory.write(place.region, place.offset, place.byte_size, as_buffer(tensor), tensor.name)
        return description + b"}", b""
    if wanted.binary:
        raw = as_buffer(tensor)
        return description + b',"parameters":{"binary_data_size":%d}}' % len(raw), raw
    if tensor.datatype in ("FP16", "BF16"):
        raise InferenceError(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    return description + b',"data":[' + write_values(tensor.data) + b"]}", b""
