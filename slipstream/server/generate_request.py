"""The generate endpoint's JSON, turned into a request of tensors by the model's configuration.

A key that names an input is that tensor, any other key is a request parameter, and the object "parameters" is
one level of the same. What the real server checks is checked here, in its order and with its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferRequest
from slipstream.server.json_errors import Members, parse_json
from slipstream.server.tensors import tensor_from_json

NESTED_KEY = "parameters"


def generate_request(body: bytes, config: ModelConfig, version: str) -> InferRequest:
    document = parse_json(body)
    if not isinstance(document, Members):
        raise InferenceError("attempt to get members for non-object", Code.INTERNAL)
    request = InferRequest(config.name, version, {}, id=_request_id(document.first()))
    _convert(request, document, config.inputs_by_name, config.max_batch_size > 0)
    check_inputs(request, config)
    return request


def _request_id(document: dict[str, Any]) -> str:
    value = document.get("id", "")
    if not isinstance(value, str):
        raise InferenceError("Unable to parse 'id': attempt to access JSON non-string as string", Code.INTERNAL)
    return value


def _convert(
    request: InferRequest, document: Members, tensors: Mapping[str, TensorConfig], batched: bool, nested: bool = False
) -> None:
    for name, value in document:
        if name == NESTED_KEY and not nested:
            if not isinstance(value, Members):
                text = f"Expected JSON object for keyword: '{name}': attempt to access JSON non-object as object"
                raise InferenceError(text, Code.INTERNAL)
            _convert(request, value, tensors, batched, nested=True)
        elif name not in tensors:
            _add_parameter(request, name, value)
        else:
            tensor = tensor_from_json(tensors[name], batched, value)
            if name in request.inputs:
                raise refused(request, f"input '{name}' already exists in request")
            request.inputs[name] = tensor


def _add_parameter(request: InferRequest, name: str, value: Any) -> None:
    if not isinstance(value, (str, bool, int, float)):
        text = f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        raise InferenceError(text)
    request.parameters[name] = value


def refused(request: InferRequest, text: str) -> InferenceError:
    return InferenceError(f"[request id: {request.id or '<id_unknown>'}] {text}")


def check_inputs(request: InferRequest, config: ModelConfig) -> None:
    """What Triton's core checks before a model sees a request, whatever the protocol."""
    if not len(config.required_inputs) <= len(request.inputs) <= len(config.inputs):
        raise _wrong_count(request, config)
    if config.max_batch_size > 0:
        _check_batch(request, config)
    for tensor in request.inputs.values():
        expected = 1
        for dim in tensor.shape:
            expected *= dim
        if tensor.datatype == "BYTES" and len(tensor.data) != expected:
            text = (
                f"unexpected number of string elements {len(tensor.data)} for inference input '{tensor.name}' "
                f"for model '{config.name}', expecting {expected}"
            )
            raise refused(request, text)


def _wrong_count(request: InferRequest, config: ModelConfig) -> InferenceError:
    """Only the number of inputs is checked, so that an optional one can hide a missing one. That is Triton's way."""
    required = config.required_inputs
    given, total = len(request.inputs), len(config.inputs)
    expected = f"number of inputs between {len(required)} and {total}" if len(required) < total else f"{total} inputs"
    got = ",".join(f"'{name}'" for name in reversed(request.inputs))
    names = ",".join(f"'{name}'" for name in required if name not in request.inputs)
    missing = f"[{names}]" if names else "]"  # the bracket is missing in Triton's text
    text = (
        f"expected {expected} but got {given} inputs for model '{config.name}'. Got input(s) [{got}], "
        f"but missing required input(s) {missing}. Please provide all required input(s)."
    )
    return refused(request, text)


def _check_batch(request: InferRequest, config: ModelConfig) -> None:
    size: int | None = None
    for tensor in reversed(request.inputs.values()):  # Triton walks a hash map that has the last one first
        if not tensor.shape:
            text = f"input '{tensor.name}' has no shape but model requires batch dimension for '{config.name}'"
            raise refused(request, text)
        if size is None:
            size = tensor.shape[0]
        elif tensor.shape[0] != size:
            raise refused(request, f"input '{tensor.name}' batch size does not match other inputs for '{config.name}'")
    if size is not None and size > config.max_batch_size:
        raise refused(request, f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'")
