"""The pages for a browser, and the OpenAPI document that one of them shows.

`/` is the page for people: chat, comparison, dashboard. Its files are in `page/`. `/docs` lists the
routes, in one file. Both fetch only from their own server, and their headers tell a browser to
enforce that.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from slipstream.server.fields.values import MESSAGES
from slipstream.server.http.exchange import Exchange
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.version import VERSION

_FOLDER = resources.files("slipstream.server.http")
_PAGE_FOLDER = "page"
_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
}
# by path: the file
PAGES = {"/": f"{_PAGE_FOLDER}/index.html", "/docs": "docs.html"} | {
    f"/{_PAGE_FOLDER}/{file.name}": f"{_PAGE_FOLDER}/{file.name}"
    for file in _FOLDER.joinpath(_PAGE_FOLDER).iterdir()
    if file.name.endswith((".js", ".css"))
}


def read_page(file: str) -> Callable[[Exchange, Mapping[str, str]], Awaitable[None]]:
    """Return the handler of a page's route, or of the route of one of its files."""
    text = _FOLDER.joinpath(file).read_text("utf-8")
    body = text.encode()
    content_type = _CONTENT_TYPES[PurePosixPath(file).suffix]
    headers = (
        (b"content-security-policy", _content_security_policy(text).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    )

    async def send_page(exchange: Exchange, parameters: Mapping[str, str]) -> None:
        await exchange.respond(200, body, content_type, headers)

    return send_page


def _content_security_policy(text: str) -> str:
    """Allow the page's own scripts and styles, and forbid frames and text that is read as HTML.

    Scripts and styles within the page are allowed by their hashes, else files of this server.
    """
    scripts = _hash_elements(text, "script") or "'self'"
    styles = _hash_elements(text, "style") or "'self'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_elements(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# -- the OpenAPI document

_TEXT_EMPTY: dict[str, Any] = {"text/plain": {}}
_JSON_OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_REGION = {"name": "region", "in": "path", "required": True, "schema": {"type": "string"}}
_FIELD_TYPES = {"BOOL": "boolean", "BYTES": "string", "FP32": "number", "FP64": "number"}


def openapi_document(registry: ModelRegistry, paths: Mapping[str, Any]) -> bytes:
    """Return the OpenAPI document of these paths and Triton's. Its examples run on this server."""
    info = {
        "title": "Slipstream",
        "version": VERSION,
        "description": "Triton's HTTP protocol, and OpenAI's.",
    }
    document = {"openapi": "3.1.0", "info": info, "paths": {**paths, **_triton_paths(registry)}}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _triton_paths(registry: ModelRegistry) -> dict[str, Any]:
    names = sorted({entry.name for entry in registry})
    example = _example_model(registry, names)
    model = {
        "name": "model",
        "in": "path",
        "required": True,
        "example": example,
        "schema": {"type": "string", "enum": names} if names else {"type": "string"},
    }
    return {
        "/v2/models/{model}/generate": _describe_generate(registry, example, model, stream=False),
        "/v2/models/{model}/generate_stream": _describe_generate(
            registry, example, model, stream=True
        ),
        "/v2/models/{model}/infer": describe_post(
            "Infer, tensors in and out", "KServe v2's answer", model
        ),
        "/v2/models/{model}/stats": describe_get("Statistics of a model", "JSON", model),
        "/v2/models/stats": describe_get("Statistics of all models", "JSON"),
        **_admin_paths(model),
        "/v2/health/live": describe_get("Whether the server answers", "Empty", empty=True),
        "/v2/health/ready": describe_get(
            "Whether the server takes work", "Empty; 400 when it does not", empty=True
        ),
        "/v2/models/{model}/ready": describe_get(
            "Whether the model takes work", "Empty", model, empty=True
        ),
        "/v2": describe_get("The server's name, version and extensions", "JSON"),
        "/v2/models/{model}": describe_get("The model's inputs and outputs", "JSON", model),
        "/v2/models/{model}/config": describe_get("The model's configuration", "JSON", model),
    }


def _example_model(registry: ModelRegistry, names: list[str]) -> str:
    text_models = [
        name for name in names if "text_input" in registry.find(name).model.config.input_names
    ]
    if not names or "ensemble" in text_models:
        return "ensemble"
    return text_models[0] if text_models else names[0]


def _admin_paths(model: dict[str, Any]) -> dict[str, Any]:
    region = "/v2/systemsharedmemory/region/{region}"
    return {
        "/v2/repository/index": describe_post(
            "The models of the repository and their states", "JSON"
        ),
        "/v2/repository/models/{model}/load": describe_post("Load a model", "Empty", model),
        "/v2/repository/models/{model}/unload": describe_post("Unload a model", "Empty", model),
        "/v2/logging": describe_get("The log settings", "JSON")
        | describe_post("Change the log settings", "JSON"),
        "/v2/trace/setting": _describe_trace(),
        "/v2/models/{model}/trace/setting": _describe_trace(model),
        "/v2/systemsharedmemory/status": describe_get("The registered regions", "JSON"),
        f"{region}/register": describe_post("Register a region", "Empty", _REGION),
        f"{region}/unregister": describe_post("Unregister a region", "Empty", _REGION),
    }


def describe_get(
    summary: str, answer: str, parameter: dict[str, Any] | None = None, empty: bool = False
) -> dict[str, Any]:
    """Return the description of a GET. `empty`: its response is text without content."""
    content = _TEXT_EMPTY if empty else _JSON_OBJECT
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": answer, "content": content}},
    }
    if parameter is not None:
        operation["parameters"] = [parameter]
    return {"get": operation}


def describe_post(
    summary: str, answer: str, parameter: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the description of a POST with a JSON object."""
    operation = describe_get(summary, answer, parameter)["get"]
    operation["requestBody"] = {"required": False, "content": _JSON_OBJECT}
    operation["responses"]["400"] = _describe_response("Refused", "application/json", _ERROR)
    return {"post": operation}


def _describe_trace(model: dict[str, Any] | None = None) -> dict[str, Any]:
    change = describe_post("Change the trace settings", "JSON", model)
    return describe_get("The trace settings", "JSON", model) | change


def _describe_generate(
    registry: ModelRegistry, name: str, model: dict[str, Any], stream: bool
) -> dict[str, Any]:
    content_type = "text/event-stream" if stream else "application/json"
    summary = "Generate, one event for each piece of text" if stream else "Generate, one answer"
    body: dict[str, Any] = {"text_input": "What is machine learning?", "max_tokens": 32}
    if stream:
        body["stream"] = True
    request = {"application/json": {"schema": _request_schema(registry, name), "example": body}}
    responses = {
        "200": _describe_response("The model's outputs", content_type, {"type": "object"}),
        "400": _describe_response("Refused by the model", content_type, _ERROR),
        "404": _describe_response("No such model", "application/json", _ERROR),
        "500": _describe_response(
            "The body is not JSON, or a value has the wrong type", "application/json", _ERROR
        ),
        "503": _describe_response("Shutting down or restarting", "application/json", _ERROR),
    }
    return {
        "post": {
            "summary": summary,
            "parameters": [model],
            "requestBody": {"required": True, "content": request},
            "responses": responses,
        }
    }


def _describe_response(
    description: str, content_type: str, schema: dict[str, Any]
) -> dict[str, Any]:
    return {"description": description, "content": {content_type: {"schema": schema}}}


def _request_schema(registry: ModelRegistry, name: str) -> dict[str, Any]:
    """Return the JSON schema of a generate request to this model."""
    if not any(entry.name == name for entry in registry):
        return {"type": "object"}
    config = registry.find(name).model.config
    properties: dict[str, Any] = {"id": {"type": "string"}}
    for tensor in config.inputs:
        kind = _FIELD_TYPES.get(tensor.datatype, "integer")
        if tensor.dims == (1,):
            properties[tensor.name] = {"type": kind}
        else:
            properties[tensor.name] = {"type": [kind, "array"], "items": {"type": kind}}
    required = [tensor.name for tensor in config.inputs if not tensor.optional]
    if MESSAGES in properties:
        properties[MESSAGES] = {"type": ["array", "string"], "items": {"type": "object"}}
        required = [name for name in required if name != "text_input"]  # one of the two
    return {"type": "object", "properties": properties, "required": required}
