"""Functions that build protobuf descriptors. The generated modules consist of calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    EnumValueDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MessageOptions,
    MethodDescriptorProto,
    OneofDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool

# The scalar types of the protocol.
BOOL = FieldDescriptorProto.TYPE_BOOL
BYTES = FieldDescriptorProto.TYPE_BYTES
DOUBLE = FieldDescriptorProto.TYPE_DOUBLE
FLOAT = FieldDescriptorProto.TYPE_FLOAT
INT32 = FieldDescriptorProto.TYPE_INT32
INT64 = FieldDescriptorProto.TYPE_INT64
STRING = FieldDescriptorProto.TYPE_STRING
UINT32 = FieldDescriptorProto.TYPE_UINT32
UINT64 = FieldDescriptorProto.TYPE_UINT64

OPTIONAL = FieldDescriptorProto.LABEL_OPTIONAL
REPEATED = FieldDescriptorProto.LABEL_REPEATED


def file(
    name: str,
    package: str,
    *,
    imports: Sequence[str] = (),
    messages: Sequence[DescriptorProto] = (),
    enums: Sequence[EnumDescriptorProto] = (),
    services: Sequence[ServiceDescriptorProto] = (),
) -> FileDescriptorProto:
    return FileDescriptorProto(
        name=name,
        package=package,
        dependency=imports,
        message_type=messages,
        enum_type=enums,
        service=services,
        syntax="proto3",
    )


def message(
    name: str,
    *members: FieldDescriptorProto | DescriptorProto | EnumDescriptorProto,
    oneofs: Sequence[str] = (),
) -> DescriptorProto:
    """Return a message type. Its members are fields, nested messages and enums."""
    return DescriptorProto(
        name=name,
        field=[member for member in members if isinstance(member, FieldDescriptorProto)],
        nested_type=[member for member in members if isinstance(member, DescriptorProto)],
        enum_type=[member for member in members if isinstance(member, EnumDescriptorProto)],
        oneof_decl=[OneofDescriptorProto(name=oneof) for oneof in oneofs],
    )


def map_entry(name: str, key: FieldDescriptorProto, value: FieldDescriptorProto) -> DescriptorProto:
    """Return the type of the items of a map field."""
    return DescriptorProto(name=name, field=[key, value], options=MessageOptions(map_entry=True))


def field(
    name: str,
    number: int,
    kind: Any,
    label: Any = OPTIONAL,
    oneof: int | None = None,
) -> FieldDescriptorProto:
    """Return a field. `kind` is a scalar type or the full name of a message: ".package.Name"."""
    message_type = isinstance(kind, str)
    return FieldDescriptorProto(
        name=name,
        number=number,
        label=label,
        type=FieldDescriptorProto.TYPE_MESSAGE if message_type else kind,
        type_name=kind if message_type else None,
        oneof_index=oneof,
        json_name=_json_name(name),
    )


def enum_field(
    name: str, number: int, type_name: str, label: Any = OPTIONAL
) -> FieldDescriptorProto:
    """Return a field whose type is an enum, given by its full name."""
    return FieldDescriptorProto(
        name=name,
        number=number,
        label=label,
        type=FieldDescriptorProto.TYPE_ENUM,
        type_name=type_name,
        json_name=_json_name(name),
    )


def _json_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def enum(name: str, **values: int) -> EnumDescriptorProto:
    return EnumDescriptorProto(
        name=name,
        value=[EnumValueDescriptorProto(name=key, number=value) for key, value in values.items()],
    )


def service(name: str, *methods: MethodDescriptorProto) -> ServiceDescriptorProto:
    return ServiceDescriptorProto(name=name, method=methods)


def method(
    name: str, request: str, response: str, *, streaming: bool = False
) -> MethodDescriptorProto:
    """Return a call: unary, or with streams both ways."""
    streams = {"client_streaming": True, "server_streaming": True} if streaming else {}
    return MethodDescriptorProto(
        name=name, input_type=request, output_type=response, options={}, **streams
    )


def message_class(pool: DescriptorPool, name: str) -> Any:
    """Return the Python class of a message by its full name."""
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
