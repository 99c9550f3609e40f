"""`schema.MESSAGES` and `schema.ENUMS` agree with model_config.proto, field by field."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from slipstream.repository.schema import ENUMS, MESSAGES
from slipstream.server.grpc.protocol.messages import ModelConfig

# Fields of the protocol that config.pbtxt files of the supported releases do not have.
NOT_READ = {("Ensembling", "max_inflight_requests")}
SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "float",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def repeated_fields(descriptor: Descriptor) -> set[str]:
    """Return the names of a message's repeated fields, in a way that all protobuf releases have."""
    copy = DescriptorProto()
    descriptor.CopyToProto(copy)
    return {one.name for one in copy.field if one.label == FieldDescriptorProto.LABEL_REPEATED}


def shape(field: FieldDescriptor) -> str:
    """Return the word before the type: "repeated", "map", "maybe" or nothing."""
    if is_map(field):
        return "map"
    if field.name in repeated_fields(field.containing_type):
        return "repeated"
    # a scalar of a oneof has no default; a message never has one
    return "maybe" if field.containing_oneof and field.message_type is None else ""


def compare_messages(
    name: str, descriptor: Descriptor, seen: dict[str, Descriptor]
) -> Iterator[str]:
    """Yield what differs between a message of the schema and its descriptor, and those inside it."""
    if name in seen:
        known = seen[name]
        # one message of the schema stands for several of the protocol, such as Switch
        if [field.name for field in known.fields] != [field.name for field in descriptor.fields]:
            yield f"{name} is {known.full_name} and {descriptor.full_name}, which differ"
        return
    seen[name] = descriptor
    fields = [field for field in descriptor.fields if (name, field.name) not in NOT_READ]
    if list(MESSAGES[name]) != [field.name for field in fields]:
        yield f"{name} has the fields {list(MESSAGES[name])}"
        return
    for field in fields:
        yield from compare_field(name, field, seen)


def compare_field(name: str, field: FieldDescriptor, seen: dict[str, Descriptor]) -> Iterator[str]:
    word, _, kind = MESSAGES[name][field.name].rpartition(" ")
    value = field.message_type.fields_by_name["value"] if is_map(field) else field
    if word != shape(field):
        yield f"{name}.{field.name} is {word!r}, not {shape(field)!r}"
    if value.message_type is not None:
        yield from compare_messages(kind, value.message_type, seen)
    elif value.enum_type is not None:
        yield from compare_enums(kind, value.enum_type)
    elif kind != SCALARS[value.type]:
        yield f"{name}.{field.name} has type {kind}, not {SCALARS[value.type]}"


def compare_enums(name: str, descriptor: EnumDescriptor) -> Iterator[str]:
    values = tuple(value.name for value in sorted(descriptor.values, key=lambda one: one.number))
    if ENUMS[name] != values:
        yield f"{name} has the values {ENUMS[name]}, not {values}"


def test_every_message_has_the_fields_of_the_protocol() -> None:
    seen: dict[str, Descriptor] = {}
    model_config = ModelConfig.DESCRIPTOR
    assert list(compare_messages("ModelConfig", model_config, seen)) == []
    assert seen.keys() == MESSAGES.keys()


def test_a_difference_is_found(monkeypatch) -> None:
    model_config = ModelConfig.DESCRIPTOR
    monkeypatch.setitem(MESSAGES, "Latest", {"num_versions": "int32"})
    monkeypatch.setitem(MESSAGES, "Specific", {"versions": "int64"})
    monkeypatch.setitem(ENUMS, "TimeoutAction", ("DELAY", "REJECT"))
    monkeypatch.setitem(MESSAGES, "Dim", {"dims": "repeated int64"})
    assert list(compare_messages("ModelConfig", model_config, {})) == [
        "Latest.num_versions has type int32, not uint32",
        "Specific.versions is '', not 'repeated'",
        "Dim has the fields ['dims']",
        "TimeoutAction has the values ('DELAY', 'REJECT'), not ('REJECT', 'DELAY')",
    ]
