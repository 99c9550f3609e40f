"""The HTTP routes around the models: repository control, logging, trace settings, shared memory."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.server.http.json_reader import Members, parse_json
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.json_writer import write_object, write_value
from slipstream.server.kserve.log_settings import log_settings, update_log_settings
from slipstream.server.kserve.registry import ModelRegistry
from slipstream.server.kserve.repository_control import check_repository_name, load_model

Answer = bytes  # the body of a 200
REPOSITORY = re.compile(r"/v2/repository(?:/([^/]+))?/(?:index|models/([^/]+)/(load|unload))")
MODEL_TRACE = re.compile(r"/v2/models/([^/]+)/trace/setting")
SHARED_MEMORY = re.compile(
    r"/v2/(system|cuda)sharedmemory(?:/region/([^/]+))?/(status|register|unregister)"
)
_NON_STRING = "attempt to access JSON non-string as string"


async def repository_route(match: re.Match[str], context: ServerContext, body: bytes) -> Answer:
    repository, model, action = match.groups(default="")
    document = _members(body)
    if not action:
        ready = document.get("ready")
        return write_value(context.control.index(ready_only=ready is True))
    check_repository_name(repository)
    parameters = document.get("parameters")
    given = dict(parameters) if isinstance(parameters, Members) else {}
    if action == "load":
        await load_model(context.control, model, given)
    else:
        await context.control.unload(model, given.get("unload_dependents") is True)
    return b""


async def logging_route(method: str, body: bytes) -> Answer:
    if method == "GET":
        return write_value(log_settings())
    return write_value(update_log_settings(dict(_members(body))))


async def trace_route(
    method: str, model: str, context: ServerContext, registry: ModelRegistry, body: bytes
) -> Answer:
    if model:
        registry.find(model)
    found = (
        context.trace.get(model)
        if method == "GET"
        else context.trace.update(dict(_members(body)), model)
    )
    return write_object(_trace_members(found))


def _trace_members(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Triton repeats the name for every attribute of the resource."""
    for name, value in settings.items():
        yield from ((name, one) for one in (value if name == "resource" else [value]))


async def shared_memory_route(match: re.Match[str], context: ServerContext, body: bytes) -> Answer:
    kind, region, action = match.groups(default="")
    memory, cuda = context.memory, kind == "cuda"
    if action == "status":
        return write_value(memory.cuda_status(region) if cuda else memory.status(region))
    if action == "unregister":
        (memory.unregister_cuda if cuda else memory.unregister)(region)
        return b""
    document = _members(body)
    if cuda:
        handle = _raw_handle(document)
        memory.register_cuda(
            region, handle, _unsigned(document, "device_id"), _unsigned(document, "byte_size")
        )
    else:
        key = _required(document, "key")
        if not isinstance(key, str):
            raise InferenceError(f"Unable to parse 'key': {_NON_STRING}", Code.INTERNAL)
        offset = 0 if document.get("offset") is None else _unsigned(document, "offset")
        memory.register(region, key, offset, _unsigned(document, "byte_size"))
    return b""


def _members(body: bytes) -> Members:
    if not body:
        return Members()
    document = parse_json(body)
    if not isinstance(document, Members):
        raise InferenceError("attempt to get members for non-object", Code.INTERNAL)
    return document


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
