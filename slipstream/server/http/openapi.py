"""The OpenAPI document of the HTTP routes, with examples that run as they stand on this server's
models.
"""

from __future__ import annotations

from typing import Any

from slipstream.server.fields.prompts import MESSAGES
from slipstream.server.http import deep_health
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.openai.describe import openai_paths
from slipstream.version import VERSION

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_REGION = {"name": "region", "in": "path", "required": True, "schema": {"type": "string"}}
_FIELD_TYPES = {"BOOL": "boolean", "BYTES": "string", "FP32": "number", "FP64": "number"}


def openapi_document(registry: ModelRegistry) -> dict[str, Any]:
    names = sorted({entry.name for entry in registry})
    text_models = [
        name for name in names if "text_input" in registry.find(name).model.config.input_names
    ]
    example = (
        "ensemble" if "ensemble" in text_models else next(iter(text_models or names), "ensemble")
    )
    model = {
        "name": "model",
        "in": "path",
        "required": True,
        "example": example,
        "schema": {"type": "string", "enum": names} if names else {"type": "string"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Slipstream",
            "version": VERSION,
            "description": "Triton's HTTP protocol, and OpenAI's.",
        },
        "paths": {
            **openai_paths(registry),
            "/v2/models/{model}/generate": _generate(registry, example, model, stream=False),
            "/v2/models/{model}/generate_stream": _generate(registry, example, model, stream=True),
            "/v2/models/{model}/infer": _post(
                "Infer, tensors in and out", "KServe v2's answer", model
            ),
            "/v2/models/{model}/stats": _get(
                "What became of the model's requests", "JSON", JSON_OBJECT, model
            ),
            "/v2/models/stats": _get("What became of all requests", "JSON", JSON_OBJECT),
            "/v2/repository/index": _post("The models of the repository and their states", "JSON"),
            "/v2/repository/models/{model}/load": _post("Load a model", "Empty", model),
            "/v2/repository/models/{model}/unload": _post("Unload a model", "Empty", model),
            "/v2/logging": _get("The log settings", "JSON", JSON_OBJECT)
            | _post("Change the log settings", "JSON"),
            "/v2/trace/setting": _trace(),
            "/v2/models/{model}/trace/setting": _trace(model),
            "/v2/systemsharedmemory/status": _get("The registered regions", "JSON", JSON_OBJECT),
            "/v2/systemsharedmemory/region/{region}/register": _post(
                "Register a region", "Empty", _REGION
            ),
            "/v2/systemsharedmemory/region/{region}/unregister": _post(
                "Forget a region", "Empty", _REGION
            ),
            deep_health.HEALTH: _get(
                "The server takes work", "Empty; 503 when it does not", JSON_OBJECT
            ),
            deep_health.GENERATE: _get(
                "Every engine makes a token", "Empty; 503 when not", JSON_OBJECT
            ),
            "/v2/health/live": _get("The server answers", "Empty", TEXT_EMPTY),
            "/v2/health/ready": _get(
                "The server takes work", "Empty; 400 when it does not", TEXT_EMPTY
            ),
            "/v2/models/{model}/ready": _get("The model takes work", "Empty", TEXT_EMPTY, model),
            "/v2": _get("The server's name, version and extensions", "JSON", JSON_OBJECT),
            "/v2/models/{model}": _get(
                "The model's inputs and outputs", "JSON", JSON_OBJECT, model
            ),
            "/v2/models/{model}/config": _get(
                "The model's configuration", "JSON", JSON_OBJECT, model
            ),
        },
    }


TEXT_EMPTY: dict[str, Any] = {"text/plain": {}}
JSON_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}


def _get(
    summary: str, answer: str, content: dict[str, Any], model: dict[str, Any] | None = None
) -> dict[str, Any]:
    responses = {"200": {"description": answer, "content": content}}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if model is not None:
        operation["parameters"] = [model]
    return {"get": operation}


def _trace(model: dict[str, Any] | None = None) -> dict[str, Any]:
    return _get("The trace settings", "JSON", JSON_OBJECT, model) | _post(
        "Change the trace settings", "JSON", model
    )


def _post(summary: str, answer: str, model: dict[str, Any] | None = None) -> dict[str, Any]:
    operation = _get(summary, answer, JSON_OBJECT, model)["get"]
    operation["requestBody"] = {"required": False, "content": JSON_OBJECT}
    operation["responses"]["400"] = _answer("It is refused", "application/json", _ERROR)
    return {"post": operation}


def _generate(
    registry: ModelRegistry, name: str, model: dict[str, Any], stream: bool
) -> dict[str, Any]:
    content_type = "text/event-stream" if stream else "application/json"
    summary = "Generate, one event for each piece of text" if stream else "Generate, one answer"
    body = {
        "text_input": "What is machine learning?",
        "max_tokens": 32,
        **({"stream": True} if stream else {}),
    }
    request = {"application/json": {"schema": _request_schema(registry, name), "example": body}}
    return {
        "post": {
            "summary": summary,
            "parameters": [model],
            "requestBody": {"required": True, "content": request},
            "responses": {
                "200": _answer("The model's outputs", content_type, {"type": "object"}),
                "400": _answer("The model refuses", content_type, _ERROR),
                "404": _answer("No such model", "application/json", _ERROR),
                "500": _answer(
                    "The body is not JSON, or a value has the wrong type",
                    "application/json",
                    _ERROR,
                ),
                "503": _answer("Shutting down or restarting", "application/json", _ERROR),
            },
        }
    }


def _answer(description: str, content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}


def _request_schema(registry: ModelRegistry, name: str) -> dict[str, Any]:
    if not any(entry.name == name for entry in registry):
        return {"type": "object"}
    config = registry.find(name).model.config
    properties: dict[str, Any] = {"id": {"type": "string"}}
    for tensor in config.inputs:
        kind = _FIELD_TYPES.get(tensor.datatype, "integer")
        several = tensor.dims != (1,)
        properties[tensor.name] = (
            {"type": [kind, "array"], "items": {"type": kind}} if several else {"type": kind}
        )
    required = [tensor.name for tensor in config.inputs if not tensor.optional]
    if MESSAGES in properties:
        properties[MESSAGES] = {"type": ["array", "string"], "items": {"type": "object"}}
        required = [name for name in required if name != "text_input"]  # either of them
    return {"type": "object", "properties": properties, "required": required}
