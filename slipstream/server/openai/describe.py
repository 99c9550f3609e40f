"""The routes under /v1 for the OpenAPI document, with their fields and runnable examples."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.openai.adapters import LoadFields, UnloadFields
from slipstream.server.openai.fields import ChatFields, CompletionFields
from slipstream.server.openai.models import text_models
from slipstream.server.openai.pooling.embeddings import EmbeddingFields
from slipstream.server.openai.pooling.rerank import RerankFields, ScoreFields
from slipstream.server.openai.responses.fields import ResponseFields
from slipstream.server.openai.tokenize import DetokenizeFields, TokenizeFields

_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_ERROR = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {"type": "object", "required": ["message", "type", "param", "code"]}
            },
        }
    }
}
_PROBLEMS = {
    "400": "A field is wrong or not supported; param is its name",
    "401": "The key is missing or wrong",
    "404": "No such model",
    "429": "The queue is full",
    "500": "The server failed",
    "503": "Shutting down or restarting",
}


def openai_paths(registry: ModelRegistry) -> dict[str, Any]:
    model = next((model.id for model in text_models(registry)), "ensemble")
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 32,
    }
    completion = {"model": model, "prompt": "One, two, three,", "max_tokens": 16}
    return {
        "/v1/models": {"get": {"summary": "List the text models", "responses": _responses()}},
        "/v1/models/{model}": {
            "get": {
                "summary": "Describe one text model",
                "responses": _responses("404"),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "example": model,
                        "schema": {"type": "string"},
                    }
                ],
            }
        },
        "/v1/chat/completions": _post(
            "Complete a conversation, whole or as a stream", ChatFields, chat
        ),
        "/v1/completions": _post(
            "Complete a text, whole or as a stream", CompletionFields, completion
        ),
        **_text_paths(model),
        **_adapter_paths(),
        **_response_paths(model),
    }


def _text_paths(model: str) -> dict[str, Any]:
    """Return the routes about texts that generate nothing."""
    return {
        "/tokenize": _post(
            "Return the tokens of a text or a conversation",
            TokenizeFields,
            {"model": model, "prompt": "One, two, three,", "return_token_strs": True},
        ),
        "/detokenize": _post(
            "Return the text of tokens", DetokenizeFields, {"model": model, "tokens": [1, 2, 3]}
        ),
        "/v1/embeddings": _post(
            "Return the embeddings of texts",
            EmbeddingFields,
            {"model": model, "input": ["One, two, three,"]},
        ),
        "/v1/rerank": _post(
            "Sort documents by how well they match a query",
            RerankFields,
            {"model": model, "query": "What is red?", "documents": ["A rose.", "The sky."]},
        ),
        "/score": _post(
            "Return how well pairs of texts match",
            ScoreFields,
            {"model": model, "text_1": "What is red?", "text_2": ["A rose.", "The sky."]},
        ),
    }


def _adapter_paths() -> dict[str, Any]:
    return {
        "/v1/load_lora_adapter": _post(
            "Load an adapter from a folder of the server; needs the admin key",
            LoadFields,
            {"lora_name": "french", "lora_path": "/srv/adapters/french"},
        ),
        "/v1/unload_lora_adapter": _post(
            "Unload an adapter; needs the admin key", UnloadFields, {"lora_name": "french"}
        ),
    }


def _response_paths(model: str) -> dict[str, Any]:
    example = {"model": model, "input": "Name three colours.", "max_output_tokens": 32}
    identity = {
        "name": "id",
        "in": "path",
        "required": True,
        "example": "resp_0",
        "schema": {"type": "string"},
    }

    def describe(summary: str) -> dict[str, Any]:
        return {"summary": summary, "parameters": [identity], "responses": _responses("404")}

    return {
        "/v1/responses": _post("Create a response, and store it", ResponseFields, example),
        "/v1/responses/input_tokens": _post(
            "Count the tokens of a response's input", ResponseFields, example
        ),
        "/v1/responses/{id}": {
            "get": describe("Return a stored response"),
            "delete": describe("Delete a stored response"),
        },
        "/v1/responses/{id}/cancel": {"post": describe("Cancel a response in the background")},
        "/v1/responses/{id}/input_items": {
            "get": describe("List the items that a response was created from")
        },
    }


def _responses(*problems: str) -> dict[str, Any]:
    errors = {status: {"description": _PROBLEMS[status], "content": _ERROR} for status in problems}
    return {"200": {"description": "A response as OpenAI's", "content": _OBJECT}, **errors}


def _post(summary: str, kind: type[msgspec.Struct], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": body_schema(kind), "example": example}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": _responses(*_PROBLEMS),
        }
    }


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return msgspec's schema of the fields with its references resolved."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    whole = dict(parts[schema["$ref"]])
    for name, field in whole["properties"].items():
        kept = {key: value for key, value in field.items() if key != "default"}
        whole["properties"][name] = _resolve(kept, parts)
    return whole


def _resolve(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object field, without the alternative null, or the schema itself."""
    for option in (schema, *schema.get("anyOf", ())):
        if "$ref" in option:
            return dict(parts[option["$ref"]])
    return schema
