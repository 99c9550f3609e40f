"""Triton's gRPC service over the same models that the HTTP endpoints serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.server.grpc.control import (
    Description,
    RepositoryCalls,
    SettingCalls,
    SharedMemoryCalls,
)
from slipstream.server.grpc.errors import answering, check_access
from slipstream.server.grpc.health import health_handlers
from slipstream.server.grpc.infer import Inference
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.reflection import reflection_handlers
from slipstream.server.grpc.transport import GrpcServer, Handler, StreamCall, Streaming, Unary
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.registry import ModelRegistry

Method = Callable[..., Awaitable[Any]]


def create_grpc_server(
    registry: ModelRegistry,
    state: ServerState,
    shared: ServerContext | None = None,
    options: GrpcOptions | None = None,
) -> GrpcServer:
    shared, options = shared or ServerContext(), options or GrpcOptions()
    handlers = {
        **_inference_handlers(registry, state, shared),
        **health_handlers(state, shared.access),
        **reflection_handlers(shared.access),
    }
    return GrpcServer(handlers, options.channel_arguments())


def _inference_handlers(
    registry: ModelRegistry, state: ServerState, shared: ServerContext
) -> dict[str, Handler]:
    inference = Inference(registry, state, shared)
    handlers: dict[str, Handler] = {}
    for name, (api, method) in _unary_methods(registry, state, shared, inference).items():
        request, _ = messages.method_messages(name)
        handlers[f"/{messages.SERVICE}/{name}"] = Unary(
            answering(method, request, shared.access, api)
        )

    async def stream_infer(call: StreamCall) -> None:
        check_access(call, shared.access, "inference")
        await inference.model_stream_infer(call)

    return {**handlers, f"/{messages.SERVICE}/ModelStreamInfer": Streaming(stream_infer)}


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
