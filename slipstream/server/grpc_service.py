"""Triton's gRPC service over the same models that the HTTP endpoints serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from slipstream.server.context import ServerContext
from slipstream.server.grpc_control import Description, RepositoryCalls, SettingCalls, SharedMemoryCalls
from slipstream.server.grpc_errors import answering, check_access, reading
from slipstream.server.grpc_health import health_handlers
from slipstream.server.grpc_infer import Inference
from slipstream.server.grpc_options import GrpcOptions
from slipstream.server.grpc_reflection import reflection_handlers
from slipstream.server.health import ServerState
from slipstream.server.protocol import messages
from slipstream.server.registry import ModelRegistry

Method = Callable[..., Awaitable[Any]]


def create_grpc_server(
    registry: ModelRegistry,
    state: ServerState,
    shared: ServerContext | None = None,
    options: GrpcOptions | None = None,
) -> grpc.aio.Server:
    shared, options = shared or ServerContext(), options or GrpcOptions()
    server = grpc.aio.server(options=options.channel_arguments(), compression=options.compression)
    server.add_generic_rpc_handlers(
        (
            _inference_handlers(registry, state, shared),
            health_handlers(state, shared.access),
            *reflection_handlers(shared.access),
            _Unimplemented(),
        )
    )
    return server


class _Unimplemented(grpc.GenericRpcHandler):
    """For every method there is not: Triton's server says no more than that."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

        return grpc.stream_stream_rpc_method_handler(refuse)


def _inference_handlers(registry: ModelRegistry, state: ServerState, shared: ServerContext) -> grpc.GenericRpcHandler:
    inference = Inference(registry, state, shared)
    handlers = {}
    for name, (api, method) in _unary_methods(registry, state, shared, inference).items():
        request, response = messages.method_messages(name)
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            answering(method, shared.access, api), reading(request.FromString), response.SerializeToString
        )

    async def stream_infer(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await check_access(context, shared.access, "inference")
        await inference.model_stream_infer(requests, context)

    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        stream_infer,
        reading(messages.ModelInferRequest.FromString),
        messages.ModelStreamInferResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _unary_methods(
    registry: ModelRegistry, state: ServerState, shared: ServerContext, inference: Inference
) -> dict[str, tuple[str, Method]]:
    """Every unary call, and the API it counts to when somebody may use only some."""
    description = Description(registry, state, shared.server_name)
    repository = RepositoryCalls(shared.control)
    memory = SharedMemoryCalls(shared.memory)
    settings = SettingCalls(registry, shared.trace)
    return {
        "ServerLive": ("health", description.server_live),
        "ServerReady": ("health", description.server_ready),
        "ModelReady": ("health", description.model_ready),
        "ServerMetadata": ("metadata", description.server_metadata),
        "ModelMetadata": ("metadata", description.model_metadata),
        "ModelConfig": ("model-config", description.model_config),
        "ModelStatistics": ("statistics", description.model_statistics),
        "ModelInfer": ("inference", inference.model_infer),
        "RepositoryIndex": ("model-repository", repository.index),
        "RepositoryModelLoad": ("model-repository", repository.load),
        "RepositoryModelUnload": ("model-repository", repository.unload),
        "SystemSharedMemoryStatus": ("shared-memory", memory.system_status),
        "SystemSharedMemoryRegister": ("shared-memory", memory.system_register),
        "SystemSharedMemoryUnregister": ("shared-memory", memory.system_unregister),
        "CudaSharedMemoryStatus": ("shared-memory", memory.cuda_status),
        "CudaSharedMemoryRegister": ("shared-memory", memory.cuda_register),
        "CudaSharedMemoryUnregister": ("shared-memory", memory.cuda_unregister),
        "TraceSetting": ("trace", settings.trace_setting),
        "LogSettings": ("logging", settings.log_settings),
    }
