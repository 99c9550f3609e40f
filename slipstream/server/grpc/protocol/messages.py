"""The classes of the protocol's messages.

They live in a descriptor pool of their own: a process may also import Triton's client library,
which registers messages of the same names in protobuf's default pool.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory

from slipstream.server.grpc.protocol import grpc_service_descriptor, model_config_descriptor
from slipstream.server.grpc.protocol.descriptors import message_class

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"


def _load_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in (model_config_descriptor, grpc_service_descriptor):
        pool.AddSerializedFile(module.FILE.SerializeToString())
    return pool


POOL = _load_pool()


def method_messages(name: str) -> tuple[Any, Any]:
    """Return the classes of a call's request and response."""
    method = POOL.FindServiceByName(SERVICE).methods_by_name[name]
    request = message_factory.GetMessageClass(method.input_type)
    response = message_factory.GetMessageClass(method.output_type)
    return request, response


ModelConfig = message_class(POOL, f"{PACKAGE}.ModelConfig")
ModelInferRequest = message_class(POOL, f"{PACKAGE}.ModelInferRequest")
ModelInferResponse = message_class(POOL, f"{PACKAGE}.ModelInferResponse")
ModelStreamInferResponse = message_class(POOL, f"{PACKAGE}.ModelStreamInferResponse")
