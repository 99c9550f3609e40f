"""The protocol's message classes, made from the compiled descriptor.

They live in a descriptor pool of their own, so that a process may also import Triton's client
library, which registers messages of the same names; and no protoc-generated code ties us to one
release of protobuf.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from slipstream.server.grpc.protocol.descriptor import FILE_DESCRIPTOR_SET

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"


def _load_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(FILE_DESCRIPTOR_SET).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load_pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def method_messages(name: str) -> tuple[Any, Any]:
    """The classes of a call's request and answer."""
    method = POOL.FindServiceByName(SERVICE).methods_by_name[name]
    return message_factory.GetMessageClass(method.input_type), message_factory.GetMessageClass(
        method.output_type
    )


ModelConfig = _message("ModelConfig")
ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelStreamInferResponse = _message("ModelStreamInferResponse")
