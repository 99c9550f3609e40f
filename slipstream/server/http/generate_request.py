"""The generate endpoint's JSON, turned into a request of tensors by the model's configuration.

A key that names an input is that tensor, any other key is a request parameter, and the object
"parameters" is one level of the same. What the real server checks is checked here, in its order and
with its words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.fields.prompts import MESSAGES, UNDECLARED
from slipstream.server.http.json_reader import Members, parse_json
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.input_checks import check_inputs, refused
from slipstream.server.kserve.tensors import tensor_from_json

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
        raise InferenceError(
            "Unable to parse 'id': attempt to access JSON non-string as string", Code.INTERNAL
        )
    return value


def _convert(
    request: InferRequest,
    document: Members,
    tensors: Mapping[str, TensorConfig],
    batched: bool,
    nested: bool = False,
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
            # others' models may call anything so
            if name == MESSAGES and tensors[name].datatype == "BYTES":
                value = _conversation(value)
            tensor = tensor_from_json(tensors[name], batched, value)
            if name in request.inputs:
                raise refused(request, f"input '{name}' already exists in request")
            request.inputs[name] = tensor


def _add_parameter(request: InferRequest, name: str, value: Any) -> None:
    if not isinstance(value, (str, bool, int, float)):
        text = (
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
        raise InferenceError(f"{text} {UNDECLARED}" if name == MESSAGES else text)
    request.parameters[name] = value


def _conversation(value: Any) -> Any:
    """A conversation may stand in the body as it is: it becomes the JSON that its tensor holds.
    Texts are that.
    """
    if isinstance(value, str) or (
        type(value) is list and value and all(isinstance(item, str) for item in value)
    ):
        return value
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Members):
        return {name: _plain(item) for name, item in value.first().items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
