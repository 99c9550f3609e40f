"""The standard services of a gRPC server: health, and reflection (v1 and v1alpha).

Their messages are built here. The packages grpcio-health-checking and grpcio-reflection would each
be a dependency for a few small messages, and their services need `grpc.aio` or `grpc.server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from slipstream.server.grpc.errors import check_access, read_message
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.protocol.descriptors import (
    BYTES,
    INT32,
    REPEATED,
    STRING,
    field,
    file,
    message,
    message_class,
)
from slipstream.server.grpc.transport import Call, Handler, StreamCall, Streaming, Unary
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.health import ServerState

HEALTH = "grpc.health.v1.Health"
# The two values of HealthCheckResponse.status as encoded messages.
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
WATCH_SECONDS = 0.5  # interval at which `Watch` looks for a change

SERVICES = (messages.SERVICE, HEALTH)
REFLECTION_VERSIONS = ("v1", "v1alpha")
_NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]


def health_handlers(state: ServerState, access: Access) -> dict[str, Handler]:
    """Return the handlers of the health service. Like Triton, it reports the server's own state."""

    def status() -> bytes:
        return _SERVING if state.ready else _NOT_SERVING

    async def check(request: bytes, call: Call) -> bytes:
        check_access(call, access, "health")
        return status()

    async def watch(call: StreamCall) -> None:
        check_access(call, access, "health")
        sent = b""
        # ends when the server drains, so that a watcher does not delay the shutdown
        while not (state.draining and sent == _NOT_SERVING):
            current = status()
            if current != sent:
                sent = current
                await call.write(current)
            else:
                await asyncio.sleep(WATCH_SECONDS)

    return {f"/{HEALTH}/Check": Unary(check), f"/{HEALTH}/Watch": Streaming(watch)}


# The messages of reflection. Both versions have the same fields; only the package differs, which
# is not on the wire.
_PACKAGE = "slipstream.reflection"
_REFLECTION = file(
    "reflection.proto",
    _PACKAGE,
    messages=[
        message(
            "Request",
            field("host", 1, STRING),
            field("file_by_filename", 3, STRING, oneof=0),
            field("file_containing_symbol", 4, STRING, oneof=0),
            field("list_services", 7, STRING, oneof=0),
            oneofs=["message_request"],
        ),
        message("Files", field("file_descriptor_proto", 1, BYTES, REPEATED)),
        message("Service", field("name", 1, STRING)),
        message("Services", field("service", 1, f".{_PACKAGE}.Service", REPEATED)),
        message("Error", field("error_code", 1, INT32), field("error_message", 2, STRING)),
        message(
            "Response",
            field("valid_host", 1, STRING),
            field("original_request", 2, f".{_PACKAGE}.Request"),
            field("file_descriptor_response", 4, f".{_PACKAGE}.Files"),
            field("list_services_response", 6, f".{_PACKAGE}.Services"),
            field("error_response", 7, f".{_PACKAGE}.Error"),
        ),
    ],
)
_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_REFLECTION.SerializeToString())
ReflectionRequest = message_class(_POOL, f"{_PACKAGE}.Request")
ReflectionResponse = message_class(_POOL, f"{_PACKAGE}.Response")


def reflection_handlers(access: Access) -> dict[str, Handler]:
    """Return the handlers with which grpcurl and similar tools list the calls of this server."""

    async def info(call: StreamCall) -> None:
        check_access(call, access, "metadata")
        async for data in call:
            response = reflect(read_message(ReflectionRequest, data))
            await call.write(response.SerializeToString())

    return {
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Streaming(info)
        for version in REFLECTION_VERSIONS
    }


def reflect(request: Any) -> Any:
    """Return the response to one reflection request."""
    response = ReflectionResponse(valid_host=request.host, original_request=request)
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        for name in SERVICES:
            response.list_services_response.service.add(name=name)
    elif kind == "file_by_filename":
        _add_file(response, messages.POOL.FindFileByName, request.file_by_filename)
    elif kind == "file_containing_symbol":
        _add_file(response, messages.POOL.FindFileContainingSymbol, request.file_containing_symbol)
    else:
        response.error_response.error_code = _UNIMPLEMENTED
        response.error_response.error_message = "this server has no extensions"
    return response


def _add_file(response: Any, find: Callable[[str], Any], name: str) -> None:
    """Add the file that `find` returns, then the files that it imports."""
    try:
        found = find(name)
    except KeyError:
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = f"'{name}' is not known to this server"
        return
    response.file_descriptor_response.file_descriptor_proto.extend(
        file.serialized_pb for file in (found, *found.dependencies)
    )
