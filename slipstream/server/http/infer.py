"""`POST /v2/models/M/infer`: one request, one response, tensors as JSON or as bytes.

A response is a JSON header, then the outputs in binary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from slipstream.repository.config import ModelConfig
from slipstream.server.http.compression import (
    choose_encoding,
    compress,
    compress_stream,
    decompress,
)
from slipstream.server.http.exchange import JSON, OCTETS, TEXT, Exchange, Headers
from slipstream.server.http.generate import send_pieces
from slipstream.server.http.infer_request import read_infer_call
from slipstream.server.kserve.call import InferCall, WantedOutput
from slipstream.server.kserve.classification import classify
from slipstream.server.kserve.errors import Code, InferenceError, PlainTextError
from slipstream.server.kserve.inference import InferResponse, ModelVersion, Parameter
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.kserve.tensor_bytes import Buffer, as_buffer
from slipstream.server.kserve.tensors import Tensor, count_values
from slipstream.server.kserve.triton_json import (
    Part,
    Values,
    leading_integer,
    write_error,
    write_object,
    write_parts,
    write_scalar,
)
from slipstream.server.text.threads import in_thread_if_long

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
NO_RESPONSE = "the model ended without an answer"
_MAX_JSON_VALUES = 65536  # with more of them a JSON response is sent in chunks
_LONG_BYTES = 1 << 20  # a longer response is not copied as a whole
HEADER_LENGTH = b"inference-header-content-length"


class InferBody(NamedTuple):
    header: list[Part]  # JSON, whose values are not written yet
    tensors: list[Buffer]  # the outputs in binary, none if all are in the header
    json_values: int  # number of values in the header


def check_coupled(entry: ModelVersion) -> None:
    if entry.model.decoupled:
        raise PlainTextError(DECOUPLED, Code.UNSUPPORTED)


async def read_call(
    exchange: Exchange, body: bytes, entry: ModelVersion, memory: SharedMemory, limit: int
) -> InferCall:
    """Return the call of a body. Long JSON is parsed in another thread."""
    encoding = exchange.header(b"content-encoding").decode("latin-1").lower()
    if encoding:
        body = await in_thread_if_long(len(body), decompress, encoding, body, limit)
    header_bytes = _read_header_bytes(exchange, len(body))
    return await in_thread_if_long(
        len(body) if header_bytes is None else header_bytes,
        read_infer_call,
        body,
        header_bytes,
        entry.model.config,
        entry.version,
        memory,
    )


def _read_header_bytes(exchange: Exchange, body_bytes: int) -> int | None:
    """Return the length of the JSON header; None if it is the whole body."""
    given = exchange.header(HEADER_LENGTH)
    if not given:
        return None if body_bytes else 0  # an empty body has no JSON header
    value = leading_integer(given.decode("latin-1")) or 0
    if not 0 <= value <= body_bytes:
        text = f"inference header size should be in range (0, {body_bytes}), got: "
        raise PlainTextError(text + given.decode("latin-1"))
    return value


def forwarded_headers(exchange: Exchange, names: re.Pattern[str]) -> dict[str, Parameter]:
    """Return the headers that models may see, as parameters, with the client's spelling."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.raw_headers
    ]
    return {name: value for name, value in pairs if names.fullmatch(name)}


async def answer_infer(
    entry: ModelVersion, call: InferCall, memory: SharedMemory, exchange: Exchange
) -> None:
    response = await _only_response(entry, call)
    if response.error is not None:
        error = response.error
        await exchange.respond(error.status, write_error(error.message), TEXT)
        return
    written = await in_thread_if_long(
        count_values(response.outputs),
        write_infer_response,
        call,
        response,
        entry.model.config,
        memory,
    )
    if written.json_values > _MAX_JSON_VALUES and not written.tensors:
        await _send_json(written, exchange)
    else:
        await _send(written, exchange)


async def _only_response(entry: ModelVersion, call: InferCall) -> InferResponse:
    """Return the first response. Reads all of them: a model that is cut off counts as cancelled."""
    first: InferResponse | None = None
    responses = entry.model.infer(call.request)
    try:
        async for response in responses:
            first = first or response
    finally:
        await responses.aclose()
    return first or InferResponse(error=InferenceError(NO_RESPONSE, Code.INTERNAL))


async def _send(written: InferBody, exchange: Exchange) -> None:
    header = await in_thread_if_long(written.json_values, _join, written.header)
    pieces = [header, *written.tensors]
    size = sum(map(len, pieces))
    headers: Headers = ()
    if written.tensors:
        headers = [(b"inference-header-content-length", b"%d" % len(header))]
    if encoding := _choose_encoding(exchange):
        pieces = await in_thread_if_long(size, compress, encoding, pieces)
        headers = [*headers, (b"content-encoding", encoding.encode())]
    content_type = OCTETS if written.tensors else JSON
    if size > _LONG_BYTES:
        await exchange.respond_in_pieces(200, pieces, content_type, headers)
    else:
        await exchange.respond(200, b"".join(pieces), content_type, headers)


async def _send_json(written: InferBody, exchange: Exchange) -> None:
    """Send a long JSON document in chunks: its length is not known before it is written."""
    pieces = write_parts(written.header)
    headers: Headers = ()
    if encoding := _choose_encoding(exchange):
        pieces = compress_stream(encoding, pieces)
        headers = [(b"content-encoding", encoding.encode())]
    exchange.start_chunks(200, JSON, headers)
    await send_pieces(exchange, pieces)
    await exchange.end_chunks()


def _choose_encoding(exchange: Exchange) -> str:
    accepted = exchange.header(b"accept-encoding").decode("latin-1")
    return choose_encoding(accepted) if accepted else ""


def _join(parts: Sequence[Part]) -> bytes:
    return b"".join(write_parts(parts))


def write_infer_response(
    call: InferCall, response: InferResponse, config: ModelConfig, memory: SharedMemory
) -> InferBody:
    request = call.request
    fixed = b'{"id":' + write_scalar(request.id) + b"," if request.id else b"{"
    fixed += _model_members(request.model_name, request.model_version)
    if response.parameters:
        fixed += b',"parameters":' + write_object(response.parameters.items())
    header: list[Part] = [fixed + b',"outputs":[']
    pieces: list[Buffer] = []
    json_values = 0
    for tensor in response.outputs:
        wanted = call.wanted(tensor.name)
        if wanted is None:
            continue
        if wanted.classes:
            tensor = classify(tensor, wanted.classes, config)
        description, piece = _write_output(tensor, wanted, memory)
        header += [b",", *description] if len(header) > 1 else description
        if piece:
            pieces.append(piece)
        json_values += sum(len(part.data) for part in description if isinstance(part, Values))
    return InferBody([*header, b"]}"], pieces, json_values)


@lru_cache(maxsize=256)
def _model_members(name: str, version: str) -> bytes:
    return write_object([("model_name", name), ("model_version", version)])[1:-1]


@lru_cache(maxsize=256)
def _description(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of an output, which is the same for many responses."""
    return write_object([("name", name), ("datatype", datatype), ("shape", shape)])[:-1]


def _write_output(
    tensor: Tensor, wanted: WantedOutput, memory: SharedMemory
) -> tuple[list[Part], Buffer]:
    """Return the output's JSON and its bytes after the header, which may be none."""
    description = _description(tensor.name, tensor.datatype, tuple(tensor.shape))
    if wanted.place is not None:
        place = wanted.place
        memory.write(place.region, place.offset, place.byte_size, as_buffer(tensor), tensor.name)
        return [description + b"}"], b""
    if wanted.binary:
        raw = as_buffer(tensor)
        return [description + b',"parameters":{"binary_data_size":%d}}' % len(raw)], raw
    if tensor.datatype in ("FP16", "BF16"):
        raise InferenceError(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    return [description + b',"data":[', Values(tensor.data), b"]}"], b""
