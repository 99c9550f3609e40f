"""Server reflection (v1 and v1alpha), so that grpcurl and its like can ask which calls there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from slipstream.server.grpc.errors import check_access, read_message
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.transport import Handler, StreamCall, Streaming
from slipstream.server.kserve.access import Access

SERVICES = (messages.SERVICE, "grpc.health.v1.Health")
VERSIONS = ("v1", "v1alpha")
_NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]
_STRING, _BYTES, _INT32, _MESSAGE = (
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
)


def _protocol() -> tuple[Any, Any]:
    """The classes of a request and an answer. Both versions have the same fields."""
    package = "slipstream.reflection"
    file = descriptor_pb2.FileDescriptorProto(name="reflection", package=package, syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = 3 if repeated else 1
            type_name = f".{package}.{of}" if of else None
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)

    message(
        "Request",
        ("host", 1, _STRING, "", False),
        ("file_by_filename", 3, _STRING, "", False),
        ("file_containing_symbol", 4, _STRING, "", False),
        ("list_services", 7, _STRING, "", False),
    )
    choice = file.message_type[0]
    choice.oneof_decl.add(name="asked")
    for field in choice.field[1:]:
        field.oneof_index = 0
    message("Files", ("file_descriptor_proto", 1, _BYTES, "", True))
    message("Service", ("name", 1, _STRING, "", False))
    message("Services", ("service", 1, _MESSAGE, "Service", True))
    message("Error", ("error_code", 1, _INT32, "", False), ("error_message", 2, _STRING, "", False))
    message(
        "Answer",
        ("valid_host", 1, _STRING, "", False),
        ("original_request", 2, _MESSAGE, "Request", False),
        ("file_descriptor_response", 4, _MESSAGE, "Files", False),
        ("list_services_response", 6, _MESSAGE, "Services", False),
        ("error_response", 7, _MESSAGE, "Error", False),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    classes = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{n}"))
        for n in _NAMES
    ]
    return classes[0], classes[1]


_NAMES = ("Request", "Answer")
Request, Answer = _protocol()


def reflection_handlers(access: Access) -> dict[str, Handler]:
    async def info(call: StreamCall) -> None:
        check_access(call, access, "metadata")
        async for data in call:
            await call.write(answer(read_message(Request, data)).SerializeToString())

    return {
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Streaming(info)
        for version in VERSIONS
    }


def answer(request: Any) -> Any:
    asked = request.WhichOneof("asked")
    made = Answer(valid_host=request.host, original_request=request)
    if asked == "list_services":
        for name in SERVICES:
            made.list_services_response.service.add(name=name)
    elif asked == "file_by_filename":
        _describe(made, messages.POOL.FindFileByName, request.file_by_filename)
    elif asked == "file_containing_symbol":
        _describe(made, messages.POOL.FindFileContainingSymbol, request.file_containing_symbol)
    else:
        made.error_response.error_code = _UNIMPLEMENTED
        made.error_response.error_message = "there are no extensions here"
    return made


def _describe(made: Any, find: Callable[[str], Any], name: str) -> None:
    """The file that was asked for, and those it needs, which it comes after."""
    try:
        file = find(name)
    except KeyError:
        made.error_response.error_code = _NOT_FOUND
        made.error_response.error_message = f"'{name}' is not known here"
        return
    made.file_descriptor_response.file_descriptor_proto.extend(
        found.serialized_pb for found in (file, *file.dependencies)
    )
