"""HTTP endpoints around the models: repository control, log and trace settings, shared memory."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.log_settings import log_settings, update_log_settings
from slipstream.server.kserve.repository_control import check_repository_name
from slipstream.server.kserve.repository_control import load_model as load_by_control
from slipstream.server.kserve.triton_json import Members, parse_json, write_object, write_value
from slipstream.server.text.threads import in_thread_if_long

_NON_STRING = "attempt to access JSON non-string as string"


@dataclass(frozen=True)
class AdminCall:
    """One call of these endpoints. Each function below returns the body of its 200 response."""

    method: str
    parameters: Mapping[str, str]  # of the path
    body: bytes
    context: ServerContext
    registry: ModelRegistry

    async def document(self) -> Members:
        """Return the body's JSON object. An empty body is an empty object."""
        if not self.body:
            return Members()
        document = await in_thread_if_long(len(self.body), parse_json, self.body)
        if not isinstance(document, Members):
            raise InferenceError("attempt to get members for non-object", Code.INTERNAL)
        return document


async def list_models(call: AdminCall) -> bytes:
    document = await call.document()
    ready_only = document.get("ready") is True
    return write_value(call.context.control.index(ready_only=ready_only))


async def load_model(call: AdminCall) -> bytes:
    values = await _control_parameters(call)
    await load_by_control(call.context.control, call.parameters["model"], values)
    return b""


async def unload_model(call: AdminCall) -> bytes:
    values = await _control_parameters(call)
    dependents = values.get("unload_dependents") is True
    await call.context.control.unload(call.parameters["model"], dependents)
    return b""


async def _control_parameters(call: AdminCall) -> dict[str, Any]:
    document = await call.document()
    check_repository_name(call.parameters["repository"])
    parameters = document.get("parameters")
    return dict(parameters) if isinstance(parameters, Members) else {}


async def configure_logging(call: AdminCall) -> bytes:
    if call.method == "GET":
        return write_value(log_settings())
    return write_value(update_log_settings(dict(await call.document())))


async def configure_tracing(call: AdminCall) -> bytes:
    """Show or change the trace settings of the model in the path, or of all models."""
    trace = call.context.trace
    model = call.parameters.get("model", "")
    if model:
        call.registry.find(model)
    if call.method == "GET":
        settings = trace.get(model)
    else:
        settings = trace.update(dict(await call.document()), model)
    return write_object(_trace_members(settings))


def _trace_members(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Triton repeats the name "resource" for each attribute of the resource."""
    for name, value in settings.items():
        for one in value if name == "resource" else [value]:
            yield name, one


async def describe_shared_memory(call: AdminCall) -> bytes:
    memory = call.context.memory
    region = call.parameters["region"]
    return write_value(memory.cuda_status(region) if _is_cuda(call) else memory.status(region))


async def register_shared_memory(call: AdminCall) -> bytes:
    memory = call.context.memory
    region = call.parameters["region"]
    document = await call.document()
    if _is_cuda(call):
        handle = _raw_handle(document)
        device = _unsigned(document, "device_id")
        memory.register_cuda(region, handle, device, _unsigned(document, "byte_size"))
        return b""
    key = _required(document, "key")
    if not isinstance(key, str):
        raise InferenceError(f"Unable to parse 'key': {_NON_STRING}", Code.INTERNAL)
    offset = 0 if document.get("offset") is None else _unsigned(document, "offset")
    memory.register(region, key, offset, _unsigned(document, "byte_size"))
    return b""


async def unregister_shared_memory(call: AdminCall) -> bytes:
    memory = call.context.memory
    unregister = memory.unregister_cuda if _is_cuda(call) else memory.unregister
    unregister(call.parameters["region"])
    return b""


def _is_cuda(call: AdminCall) -> bool:
    return call.parameters["kind"] == "cuda"


def _required(document: Members, name: str) -> Any:
    value = document.get(name)
    if value is None:
        raise InferenceError(f"Shared memory register request has no '{name}' field")
    return value


def _unsigned(document: Members, name: str) -> int:
    value = _required(document, name)
    if type(value) is not int or not 0 <= value < 2**63:
        text = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise InferenceError(f"Unable to parse '{name}': {text}", Code.INTERNAL)
    return value


def _raw_handle(document: Members) -> bytes:
    handle = _required(document, "raw_handle")
    text = handle.get("b64") if isinstance(handle, Members) else None
    if not isinstance(text, str):
        raise InferenceError("Shared memory register request has no 'b64' field")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""  # refused by its length
