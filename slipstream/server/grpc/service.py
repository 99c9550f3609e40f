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
from slipstream.server.grpc.errors import check_access, unary_call, unary_message
from slipstream.server.grpc.infer import Inference
from slipstream.server.grpc.options import GrpcOptions
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.standard_services import health_handlers, reflection_handlers
from slipstream.server.grpc.transport import (
    GrpcServer,
    Handler,
    StreamCall,
    Streaming,
    create_server,
)
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.tracing.settings import TraceSettings

Method = Callable[[Any], Awaitable[Any]]


def _path(method: str) -> str:
    return f"/{messages.SERVICE}/{method}"


MODEL_INFER = _path("ModelInfer")
MODEL_STREAM_INFER = _path("ModelStreamInfer")
SERVER_LIVE = _path("ServerLive")


def create_grpc_server(
    registry: ModelRegistry,
    state: ServerState,
    shared: ServerContext | None = None,
    options: GrpcOptions | None = None,
) -> GrpcServer:
    shared = shared or ServerContext(trace=TraceSettings())
    options = options or GrpcOptions()
    handlers = create_handlers(registry, state, shared)
    return create_server(handlers, options.channel_arguments(), options.transport)


def create_handlers(
    registry: ModelRegistry, state: ServerState, shared: ServerContext
) -> dict[str, Handler]:
    """Return the handlers of all calls, by path."""
    return {
        **_inference_handlers(Inference(registry, state, shared), shared),
        **_control_handlers(registry, state, shared),
        **health_handlers(state, shared.access),
        **reflection_handlers(shared.access),
    }


def _inference_handlers(inference: Inference, shared: ServerContext) -> dict[str, Handler]:
    request, _ = messages.method_messages("ModelInfer")

    async def stream_infer(call: StreamCall) -> None:
        check_access(call, shared.access, "inference")
        await inference.model_stream_infer(call)

    return {
        MODEL_INFER: unary_call(inference.model_infer, request, shared.access, "inference"),
        MODEL_STREAM_INFER: Streaming(stream_infer),
    }


def _control_handlers(
    registry: ModelRegistry, state: ServerState, shared: ServerContext
) -> dict[str, Handler]:
    handlers: dict[str, Handler] = {}
    for name, (api, method) in _control_methods(registry, state, shared).items():
        request, _ = messages.method_messages(name)
        handlers[_path(name)] = unary_message(method, request, shared.access, api)
    return handlers


def _control_methods(
    registry: ModelRegistry, state: ServerState, shared: ServerContext
) -> dict[str, tuple[str, Method]]:
    """Return the calls other than inference, each with the API that access rules name it by."""
    description = Description(registry, state, shared)
    repository = RepositoryCalls(shared.control)
    memory = SharedMemoryCalls(shared.memory)
    settings = SettingCalls(registry, shared)
    return {
        "ServerLive": ("health", description.server_live),
        "ServerReady": ("health", description.server_ready),
        "ModelReady": ("health", description.model_ready),
        "ServerMetadata": ("metadata", description.server_metadata),
        "ModelMetadata": ("metadata", description.model_metadata),
        "ModelConfig": ("model-config", description.model_config),
        "ModelStatistics": ("statistics", description.model_statistics),
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
