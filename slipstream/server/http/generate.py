"""The generate endpoints: JSON to a request of tensors, and responses to one flat JSON object.

`generate` answers with one object. `generate_stream` sends one event for each response.

In a request, a key that names an input is that tensor, any other key is a request parameter, and
the object "parameters" holds more keys of both kinds. Checks, their order and their texts are
Triton's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.fields.values import MESSAGES, UNDECLARED
from slipstream.server.http.exchange import EVENTS, JSON, Exchange
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, Parameter, ServedModel
from slipstream.server.kserve.input_checks import (
    check_inputs,
    check_member_count,
    request_error,
)
from slipstream.server.kserve.long_json import LongArray
from slipstream.server.kserve.tensors import Tensor, count_values, tensor_from_json
from slipstream.server.kserve.triton_json import (
    VALUES_AT_ONCE,
    Members,
    Part,
    Values,
    parse_json,
    write_error,
    write_parts,
    write_scalar,
    write_string,
)
from slipstream.server.text.threads import in_thread_if_long

NESTED_KEY = "parameters"
EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


async def read_request(body: bytes, config: ModelConfig, version: str) -> InferRequest:
    """Return the request of a JSON body. A long body is parsed in another thread."""
    return await in_thread_if_long(len(body), generate_request, body, config, version)


def generate_request(body: bytes, config: ModelConfig, version: str) -> InferRequest:
    document = parse_json(body)
    if not isinstance(document, Members):
        raise InferenceError("attempt to get members for non-object", Code.INTERNAL)
    values = document.first()  # a repeated name has its first value each time
    request = InferRequest(config.name, version, {}, id=_request_id(values))
    _convert(request, document, values, config.inputs_by_name, config.max_batch_size > 0)
    check_inputs(request, config)
    return request


def _request_id(document: dict[str, Any]) -> str:
    value = document.get("id", "")
    if not isinstance(value, str):
        raise InferenceError(
            "Unable to parse 'id': attempt to access JSON non-string as string", Code.INTERNAL
        )
    return value


def _convert(
    request: InferRequest,
    document: Members,
    values: Mapping[str, Any],
    tensors: Mapping[str, TensorConfig],
    batched: bool,
    nested: bool = False,
) -> None:
    """Add each key of the document to the request, as an input or as a parameter."""
    check_member_count(document)
    for name, _ in document:
        value = values[name]
        if name == NESTED_KEY and not nested:
            _convert_nested(request, value, tensors, batched)
        elif name not in tensors:
            _add_parameter(request, name, value)
        else:
            # A Python model may have an input of this name with another type.
            if name == MESSAGES and tensors[name].datatype == "BYTES":
                value = _encode_messages(value)
            tensor = tensor_from_json(tensors[name], batched, value)
            if name in request.inputs:
                raise request_error(request, f"input '{name}' already exists in request")
            request.inputs[name] = tensor


def _convert_nested(
    request: InferRequest, value: Any, tensors: Mapping[str, TensorConfig], batched: bool
) -> None:
    if not isinstance(value, Members):
        text = "attempt to access JSON non-object as object"
        raise InferenceError(
            f"Expected JSON object for keyword: '{NESTED_KEY}': {text}", Code.INTERNAL
        )
    try:
        _convert(request, value, value.first(), tensors, batched, nested=True)
    except InferenceError as error:
        text = f"Converting keyword: '{NESTED_KEY}': {error.message}"
        raise InferenceError(text, error.code) from error


def _add_parameter(request: InferRequest, name: str, value: Any) -> None:
    if not isinstance(value, (str, bool, int, float)):
        text = (
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
        raise InferenceError(f"{text} {UNDECLARED}" if name == MESSAGES else text)
    request.parameters[name] = value


def _encode_messages(value: Any) -> Any:
    """Return a conversation as the JSON text of its tensor. Texts are returned unchanged."""
    if isinstance(value, str) or (
        type(value) is list and value and all(isinstance(item, str) for item in value)
    ):
        return value
    if type(value) is not list:
        return json.dumps(_to_plain_value(value), ensure_ascii=False)
    # one by one: json.dumps would hold the interpreter's lock, and so the event loop, to its end
    messages = [json.dumps(_to_plain_value(message), ensure_ascii=False) for message in value]
    return f"[{', '.join(messages)}]"


def _to_plain_value(value: Any) -> Any:
    """Return a parsed value with dictionaries in place of `Members`."""
    if isinstance(value, Members):
        return {name: _to_plain_value(item) for name, item in value.first().items()}
    if isinstance(value, list):
        return [_to_plain_value(item) for item in value]
    return value.head() if isinstance(value, LongArray) else value


async def answer_once(model: ServedModel, request: InferRequest, exchange: Exchange) -> None:
    """Send the model's only response. As in Triton, the status is that of the first response, and a
    second one changes only the body.
    """
    first: InferResponse | None = None
    more = False
    responses = model.infer(request)
    try:
        async for response in responses:
            if first is not None:
                more = True
                break
            first = response
            if response.error is not None:
                break
    finally:
        await responses.aclose()
    failed = first is not None and first.error is not None
    exchange.start_chunks(400 if failed else 200, JSON)
    if first is None or more:
        await exchange.end_chunks(write_error(EXACTLY_ONE))
    elif count_values(first.outputs) <= VALUES_AT_ONCE:
        await exchange.end_chunks(write_response(request, first))
    else:  # logits may be millions of numbers
        await send_pieces(exchange, write_parts(response_parts(request, first)))
        await exchange.end_chunks()


async def answer_stream(model: ServedModel, request: InferRequest, exchange: Exchange) -> None:
    """Send each response of the model as an event."""
    events = EventWriter(request)
    started = False
    async with aclosing(model.infer(request)) as responses:
        try:
            async for response in responses:
                if not started:
                    exchange.start_chunks(200 if response.error is None else 400, EVENTS)
                    started = True
                body = events.write_next(response)
                if body is None and count_values(response.outputs) > VALUES_AT_ONCE:
                    parts = response_parts(request, response)
                    await send_pieces(exchange, write_parts([b"data: ", *parts, b"\n\n"]))
                else:
                    await exchange.send_chunk(body or events.write(response))
        except InferenceError as error:
            if not started:
                raise
            await exchange.send_chunk(b"data: " + write_error(error.message) + b"\n\n")
    if not started:
        exchange.start_chunks(200, EVENTS)
    await exchange.end_chunks()


async def send_pieces(exchange: Exchange, pieces: Iterator[bytes]) -> None:
    """Send a long document as chunks, no faster than the client reads. A thread writes each."""
    while (piece := await in_thread_if_long(VALUES_AT_ONCE, next, pieces, None)) is not None:
        await exchange.send_chunk(piece)


def write_response(request: InferRequest, response: InferResponse) -> bytes:
    """Return a response as one flat JSON object with sorted keys."""
    return b"".join(write_parts(response_parts(request, response)))


def response_parts(request: InferRequest, response: InferResponse) -> list[Part]:
    """Return the same object in parts, whose tensors are not written yet."""
    if response.error is not None:
        return [write_error(response.error.message)]
    fixed = _fixed_members(request, response.parameters)
    names = [tensor.name for tensor in response.outputs] + [name for name, _ in fixed]
    values = [_tensor_parts(tensor) for tensor in response.outputs] + [
        [value] for _, value in fixed
    ]
    parts: list[Part] = []
    for position, key in _layout(tuple(names)):
        parts += [b"," + key if parts else b"{" + key, *values[position]]
    return [*parts, b"}"]


class EventWriter:
    """Writes the events of one stream. Everything but the values of the outputs is the same in each
    event and is written once.
    """

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._names: list[str] = []
        self._parameters: Mapping[str, Parameter] | None = None
        self._pieces: list[bytes] = []  # constant text and, in between, places for the values
        self._slots: list[tuple[int, int]] = []  # (index of the piece, index of the output)
        self._others: Sequence[Tensor] = ()  # the last event's outputs after the first
        self._first_slot: int | None = None  # index of the piece for the first output's value

    def write_next(self, response: InferResponse) -> bytes | None:
        """Return an event whose first output alone differs from the last event's: a new text.

        None where more has changed: `write` writes it.
        """
        outputs = response.outputs
        if (
            self._first_slot is None
            or response.error is not None
            or not outputs
            or outputs[1:] != self._others
            or outputs[0].name != self._names[0]
            or response.parameters is not self._parameters
        ):
            return None
        self._pieces[self._first_slot] = write_tensor(outputs[0])
        return b"".join(self._pieces)

    def write(self, response: InferResponse) -> bytes:
        if response.error is not None:
            return b"data: " + write_error(response.error.message) + b"\n\n"
        names = [tensor.name for tensor in response.outputs]
        parameters = response.parameters
        if names != self._names or (
            parameters is not self._parameters and parameters != self._parameters
        ):
            self._write_constant_pieces(names, parameters)
        self._others = response.outputs[1:]
        for piece, output in self._slots:
            self._pieces[piece] = write_tensor(response.outputs[output])
        return b"".join(self._pieces)

    def _write_constant_pieces(self, names: list[str], parameters: Mapping[str, Parameter]) -> None:
        fixed = _fixed_members(self._request, parameters)
        self._names = names
        self._parameters = parameters
        self._pieces = []
        self._slots = []
        self._first_slot = None
        text = b"data: {"
        layout = _layout((*names, *(name for name, _ in fixed)))
        for position, key in layout:
            text += key
            if position < len(names):
                self._slots.append((len(self._pieces) + 1, position))
                if position == 0:
                    self._first_slot = len(self._pieces) + 1
                self._pieces += (text, b"")
                text = b""
            else:
                text += fixed[position - len(names)][1]
            text += b"," if key is not layout[-1][1] else b"}\n\n"
        self._pieces.append(text)


def _fixed_members(
    request: InferRequest, parameters: Mapping[str, Parameter]
) -> list[tuple[str, bytes]]:
    """Return the members of a response besides its outputs, as (name, JSON)."""
    members: list[tuple[str, Parameter]] = [*parameters.items()]
    members += [("model_name", request.model_name), ("model_version", request.model_version)]
    if request.id:
        members.append(("id", request.id))
    return [(name, write_scalar(value)) for name, value in members]


@lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
    """Return (index of the value, its key as JSON) in the order of the response.

    Triton sorts the keys by their bytes. A repeated name keeps its last value.
    """
    positions = {
        name.encode("utf-8", "surrogateescape"): position for position, name in enumerate(names)
    }
    return tuple(
        (position, write_string(name) + b":") for name, position in sorted(positions.items())
    )


def write_tensor(tensor: Tensor) -> bytes:
    """Return a tensor as JSON: one element as a scalar, several as a flat array."""
    return b"".join(write_parts(_tensor_parts(tensor)))


def _tensor_parts(tensor: Tensor) -> list[Part]:
    if len(tensor.data) == 1:
        return [write_scalar(tensor.first)]
    return [b"[", Values(tensor.data), b"]"]
