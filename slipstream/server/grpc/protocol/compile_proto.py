"""Write the descriptor modules from the `.proto` files: `python -m ….compile_proto`.

A tool for developers; it needs grpcio-tools. The modules are text that can be reviewed. They depend
on no release of protobuf, and build the descriptors in a pool of our own (see `messages.py`), which
the modules that protoc writes do not.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

HERE = Path(__file__).parent
PROTO_FILES = ("model_config.proto", "grpc_service.proto")  # each after its imports
LINE_CHARACTERS = 100
_INDENT = "    "
_MODULE = "slipstream.server.grpc.protocol.descriptors"


def compile_proto(folder: Path = HERE) -> dict[str, str]:
    """Return the text of the module of each `.proto` file by its file name."""
    return {_module_name(file.name): render(file) for file in read_proto(folder).file}


def read_proto(folder: Path = HERE) -> FileDescriptorSet:
    """Return the descriptors of the `.proto` files as protoc reads them."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "descriptors"
        arguments = [f"--proto_path={folder}", f"--descriptor_set_out={output}", *PROTO_FILES]
        if protoc.main(["protoc", *arguments]) != 0:
            raise SystemExit("protoc could not read the .proto files")
        return FileDescriptorSet.FromString(output.read_bytes())


def _module_name(proto_file: str) -> str:
    return proto_file.removesuffix(".proto") + "_descriptor.py"


def render(file: FileDescriptorProto) -> str:
    """Return the Python module that builds this descriptor."""
    parts = {
        "imports": [repr_text(name) for name in file.dependency],
        "messages": [_render_message(message, 2) for message in file.message_type],
        "enums": [_render_enum(enum, 2) for enum in file.enum_type],
        "services": [_render_service(service, 2) for service in file.service],
    }
    arguments = [repr_text(file.name), repr_text(file.package)]
    for name, items in parts.items():
        if items:
            arguments.append(f"{name}={_join('[', items, ']', 1, len(name) + 2)}")
    body = f"FILE = {_join('file(', arguments, ')', 0, 8)}\n"
    words = re.findall(r"\w+", re.sub(r'"[^"]*"', "", body))
    names = sorted(_BUILDERS & set(words))
    head = f'"""Generated from {file.name} by compile_proto.py; do not edit."""\n\n'
    imports = "".join(f"{_INDENT}{name},\n" for name in names)
    return f"{head}from {_MODULE} import (\n{imports})\n\n{body}"


_SCALARS = {
    getattr(FieldDescriptorProto, f"TYPE_{name}"): name
    for name in ("BOOL", "BYTES", "DOUBLE", "FLOAT", "INT32", "INT64", "STRING", "UINT32", "UINT64")
}
_BUILDERS = {
    *_SCALARS.values(),
    "REPEATED",
    "enum",
    "enum_field",
    "field",
    "file",
    "map_entry",
    "message",
    "method",
    "service",
}


def repr_text(text: str) -> str:
    return f'"{text}"'


def _join(start: str, items: Iterable[str], end: str, depth: int, offset: int = 0) -> str:
    """Return the items on one line where they fit, else one per line.

    `depth` is the indentation of the line that it starts in, `offset` what stands before it there.
    """
    items = list(items)
    line = f"{start}{', '.join(items)}{end}"
    if "\n" not in line and depth * len(_INDENT) + offset + len(line) + 1 <= LINE_CHARACTERS:
        return line
    inner = _INDENT * (depth + 1)
    return f"{start}\n" + "".join(f"{inner}{item},\n" for item in items) + _INDENT * depth + end


def _render_message(message: DescriptorProto, depth: int) -> str:
    if message.options.map_entry:
        key, value = (_render_field(field, depth + 1) for field in message.field)
        return _join("map_entry(", [repr_text(message.name), key, value], ")", depth)
    items = [repr_text(message.name)]
    items += [_render_enum(enum, depth + 1) for enum in message.enum_type]
    items += [_render_message(nested, depth + 1) for nested in message.nested_type]
    items += [_render_field(field, depth + 1) for field in message.field]
    if message.oneof_decl:
        names = [repr_text(oneof.name) for oneof in message.oneof_decl]
        items.append(f"oneofs={_join('[', names, ']', depth + 1, 7)}")
    return _join("message(", items, ")", depth)


def _render_field(field: FieldDescriptorProto, depth: int) -> str:
    builder = "enum_field(" if field.type == FieldDescriptorProto.TYPE_ENUM else "field("
    kind = repr_text(field.type_name) if field.type_name else _SCALARS[field.type]
    items = [repr_text(field.name), str(field.number), kind]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        items.append("REPEATED")
    if field.HasField("oneof_index"):
        items.append(f"oneof={field.oneof_index}")
    return _join(builder, items, ")", depth)


def _render_enum(enum: EnumDescriptorProto, depth: int) -> str:
    values = [f"{value.name}={value.number}" for value in enum.value]
    return _join("enum(", [repr_text(enum.name), *values], ")", depth)


def _render_service(service: ServiceDescriptorProto, depth: int) -> str:
    methods = [_render_method(method, depth + 1) for method in service.method]
    return _join("service(", [repr_text(service.name), *methods], ")", depth)


def _render_method(method: MethodDescriptorProto, depth: int) -> str:
    items = [repr_text(name) for name in (method.name, method.input_type, method.output_type)]
    if method.client_streaming:
        items.append("streaming=True")
    return _join("method(", items, ")", depth)


def main() -> int:
    for name, text in compile_proto().items():
        (HERE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
