"""The answer of `/infer`: a JSON header, then the outputs that were asked for in binary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.repository.config import ModelConfig
from slipstream.server.http.infer_request import InferCall, WantedOutput
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferResponse
from slipstream.server.kserve.json_writer import write_object, write_scalar, write_values
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import Buffer, as_buffer
from slipstream.server.kserve.tensors import Tensor

MAX_LABEL_BYTES = 16 << 20


class InferBody(NamedTuple):
    header: bytes
    tensors: list[Buffer]  # the outputs in binary, none if all are in the header


def values_as_text(call: InferCall, response: InferResponse) -> int:
    """How many there are to write one by one."""
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
        if wanted is not None:
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
    """The beginning of an output, which is the same for many answers."""
    return write_object([("name", name), ("datatype", datatype), ("shape", shape)])[:-1]


def _write_output(
    tensor: Tensor, wanted: WantedOutput, memory: SharedMemory
) -> tuple[bytes, Buffer]:
    description = _description(tensor.name, tensor.datatype, tuple(tensor.shape))
    if wanted.place is not None:
        place = wanted.place
        memory.write(place.region, place.offset, place.byte_size, as_buffer(tensor), tensor.name)
        return description + b"}", b""
    if wanted.binary:
        raw = as_buffer(tensor)
        return description + b',"parameters":{"binary_data_size":%d}}' % len(raw), raw
    if tensor.datatype in ("FP16", "BF16"):
        text = f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        raise InferenceError(f"{text} {tensor.name}")
    return description + b',"data":[' + write_values(tensor.data) + b"]}", b""


def classify(tensor: Tensor, count: int, config: ModelConfig) -> Tensor:
    """The highest values of each batch item as "value:index:label"."""
    if tensor.datatype in ("BYTES", "FP16", "BF16"):
        raise InferenceError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    batched = config.max_batch_size > 0
    rows = tensor.shape[0] if batched and tensor.shape else 1
    width = prod(tensor.shape[1:]) if batched else len(tensor.data)
    labels = _labels(config, tensor.name)
    kept = min(count, width)
    found: list[bytes] = []
    all_values = tensor.values()
    for row in range(rows):
        values = all_values[row * width : (row + 1) * width]
        best = sorted(range(width), key=lambda index: (-values[index], index))[:kept]
        found += [_class_text(values[index], index, labels) for index in best]
    shape = (rows, kept) if batched else (kept,)
    return Tensor(tensor.name, "BYTES", shape, found)


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    shown = f"{value:f}" if isinstance(value, float) else str(int(value))
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{shown}:{index}{label}".encode()


def _labels(config: ModelConfig, output: str) -> tuple[str, ...]:
    name = next((tensor.label_filename for tensor in config.outputs if tensor.name == output), "")
    return _read_labels(config.file.parent / name) if name else ()


@lru_cache(maxsize=64)
def _read_labels(file: Path) -> tuple[str, ...]:
    try:
        with file.open("rb") as opened:
            return tuple(opened.read(MAX_LABEL_BYTES).decode("utf-8", "replace").splitlines())
    except OSError as error:
        raise InferenceError(f"the labels of an output cannot be read: {error.strerror}") from error
