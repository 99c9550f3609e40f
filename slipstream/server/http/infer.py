"""`POST /v2/models/M/infer`: one request, one response, tensors as JSON or as bytes."""

from __future__ import annotations

import re

from slipstream.server.http.compression import choose_encoding, compress, decompress
from slipstream.server.http.exchange import JSON, OCTETS, TEXT, Exchange, Headers
from slipstream.server.http.infer_request import read_infer_call
from slipstream.server.http.infer_response import InferBody, values_as_text, write_infer_response
from slipstream.server.kserve.call import InferCall
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferResponse, Parameter
from slipstream.server.kserve.json_writer import write_error
from slipstream.server.kserve.registry import ModelVersion
from slipstream.server.kserve.shared_memory import SharedMemory
from slipstream.server.text.threads import in_thread_if_long

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
NO_RESPONSE = "the model ended without an answer"
HEADER_LENGTH = b"inference-header-content-length"


class EarlyError(InferenceError):
    """An error found before the body is read, or of the model: Triton sends these as text/plain."""


def check_coupled(entry: ModelVersion) -> None:
    if entry.model.decoupled:
        raise EarlyError(DECOUPLED, Code.UNSUPPORTED)


def read_call(
    exchange: Exchange, body: bytes, entry: ModelVersion, memory: SharedMemory, most: int
) -> InferCall:
    if encoding := exchange.header(b"content-encoding"):
        body = decompress(encoding.decode("latin-1").lower(), body, most)
    given = exchange.header(HEADER_LENGTH)
    size = _header_bytes(given, len(body)) if given else None
    return read_infer_call(body, size, entry.model.config, entry.version, memory)


def _header_bytes(given: bytes, body_bytes: int) -> int:
    digits = given.removeprefix(b"-")
    # what is no number counts as 0, as in C
    value = int(given) if digits.isdigit() and len(digits) < 20 else 0
    if value < 0 or value > body_bytes:
        text = f"inference header size should be in range (0, {body_bytes}), got: {value}"
        raise EarlyError(text)
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
        values_as_text(call, response),
        write_infer_response,
        call,
        response,
        entry.model.config,
        memory,
    )
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
    body = b"".join([written.header, *written.tensors])
    headers: Headers = ()
    if written.tensors:
        headers = [(b"inference-header-content-length", b"%d" % len(written.header))]
    accepted = exchange.header(b"accept-encoding").decode("latin-1")
    encoding = choose_encoding(accepted) if accepted else ""
    if encoding:
        body = compress(encoding, body)
        headers = [*headers, (b"content-encoding", encoding.encode())]
    await exchange.respond(200, body, OCTETS if written.tensors else JSON, headers)
