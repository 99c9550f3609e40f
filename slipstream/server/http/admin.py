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
from slipstream.server.kserve.repository_control import (
    FILE_PREFIX,
    LoadParameters,
    check_repository_name,
)
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
        """Return the members of the body's JSON; none of a body that is not an object."""
        document = await in_thread_if_long(len(self.body), parse_json, self.body)
        return document if isinstance(document, Members) else Members()

    async def optional_document(self) -> Members:
        """Return the members of the body's JSON; none of an empty body."""
        return await self.document() if self.body else Members()


async def list_models(call: AdminCall) -> bytes:
    document = (await call.optional_document()).first()
    ready_only = document.get("ready", False)
    if not isinstance(ready_only, bool):
        raise InferenceError("attempt to access JSON non-boolean as boolean", Code.INTERNAL)
    return write_value(call.context.control.index(ready_only=ready_only))


async def load_model(call: AdminCall) -> bytes:
    document = (await call.optional_document()).first()
    check_repository_name(call.parameters["repository"])
    parameters = await in_thread_if_long(len(call.body), _load_parameters, document)
    await load_by_control(call.context.control, call.parameters["model"], parameters)
    return b""


def _load_parameters(document: Mapping[str, Any]) -> LoadParameters:
    parameters = LoadParameters()
    if "parameters" not in document:
        return parameters
    given = document["parameters"]
    if not isinstance(given, Members):
        raise InferenceError("attempt to get members for non-object", Code.INTERNAL)
    for name, value in given.first().items():
        _add_load_parameter(parameters, name, value)
    return parameters


def _add_load_parameter(parameters: LoadParameters, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InferenceError(_NON_STRING, Code.INTERNAL)
    if name == "config":
        parameters.config = value
    elif name.startswith(FILE_PREFIX):
        parameters.files[name] = _decode_base64(value)
    else:
        raise InferenceError("unexpected error on creating Triton parameter", Code.INTERNAL)


async def unload_model(call: AdminCall) -> bytes:
    check_repository_name(call.parameters["repository"])
    dependents = await _unload_dependents(call)
    await call.context.control.unload(call.parameters["model"], dependents)
    return b""


async def _unload_dependents(call: AdminCall) -> bool:
    """Return the parameter of that name. Like Triton, ignore a body that cannot be read."""
    try:
        parameters = (await call.optional_document()).first().get("parameters")
    except InferenceError:
        return False
    return isinstance(parameters, Members) and parameters.first().get("unload_dependents") is True


async def configure_logging(call: AdminCall) -> bytes:
    if call.method == "GET":
        return write_value(log_settings())
    return write_value(update_log_settings((await call.document()).first()))


async def configure_tracing(call: AdminCall) -> bytes:
    """Show or change the trace settings of the model in the path, or of all models."""
    trace = call.context.trace
    model = call.parameters.get("model", "")
    if model and model not in call.registry:
        raise InferenceError(f"Request for unknown model : {model}")
    if call.method == "GET":
        settings = trace.get(model)
    else:
        settings = trace.update((await call.document()).first(), model)
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
    if not region:
        kind = call.parameters["kind"]
        raise InferenceError(f"'region name' is necessary to register {kind} shared memory region")
    document = (await call.document()).first()
    if _is_cuda(call):
        handle = _raw_handle(document)
        device = _unsigned(_member(document, "device_id"))
        memory.register_cuda(region, handle, device, _unsigned(_member(document, "byte_size")))
        return b""
    key = _string(_required(document, "key"))
    offset = _unsigned(document.get("offset", 0))
    memory.register(region, key, offset, _unsigned(_required(document, "byte_size")))
    return b""


async def unregister_shared_memory(call: AdminCall) -> bytes:
    memory = call.context.memory
    unregister = memory.unregister_cuda if _is_cuda(call) else memory.unregister
    unregister(call.parameters["region"])
    return b""


def _is_cuda(call: AdminCall) -> bool:
    return call.parameters["kind"] == "cuda"


def _required(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise InferenceError(f"Shared memory register request has no '{name}' field")
    return document[name]


def _member(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise InferenceError(
            f"attempt to access non-existing object member '{name}'", Code.INTERNAL
        )
    return document[name]


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise InferenceError(_NON_STRING, Code.INTERNAL)
    return value


def _unsigned(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        text = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise InferenceError(text, Code.INTERNAL)
    return value


def _raw_handle(document: Mapping[str, Any]) -> bytes:
    handle = _required(document, "raw_handle")
    members = handle.first() if isinstance(handle, Members) else {}
    return _decode_base64(_string(_member(members, "b64")))


def _decode_base64(text: str) -> bytes:
    """Return the bytes of a text; nothing where it is not base64, which later checks refuse."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
