"""Who may use which route: a new route must be added here."""

from __future__ import annotations

from slipstream.server.http.pages import PAGES

OPEN = "open"  # pages, which hold no secrets
PROBE = "probe"  # health, without a key unless --health-needs-key
USER = "user"
ADMIN = "admin"

_MODEL = "/v2/models/{model}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository}]"
_MEMORY = "/v2/{kind}sharedmemory[/region/{region}]"

HTTP: dict[str, str] = {
    **dict.fromkeys(PAGES, OPEN),
    **dict.fromkeys(
        (
            "/v2/health/live",
            "/v2/health/ready",
            f"{_MODEL}/ready",
            "/health",
            "/health/ready",
            "/ping",
        ),
        PROBE,
    ),
    **dict.fromkeys(
        (
            "/v2",
            "/v2/models/stats",
            _MODEL,
            f"{_MODEL}/infer",
            f"{_MODEL}/generate",
            f"{_MODEL}/generate_stream",
            f"{_MODEL}/config",
            f"{_MODEL}/stats",
            "/openapi.json",
            "/health_generate",
            "/version",
            "/load",
            "/metrics",
            "/dashboard/metrics",
            "/dashboard/steps",
            "/tokenize",
            "/detokenize",
            "/rerank",
            "/score",
            "/v1/rerank",
            "/v2/rerank",
            "/v1/score",
            "/v1/models",
            "/v1/models/{rest}",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/messages[/{rest}]",
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/responses/{id}",
            "/v1/responses/{id}/cancel",
            "/v1/responses/{id}/input_items",
        ),
        USER,
    ),
    **dict.fromkeys(
        (
            f"{_REPOSITORY}/index",
            f"{_REPOSITORY}/models/{{model}}/load",
            f"{_REPOSITORY}/models/{{model}}/unload",
            "/v2/logging",
            "/v2/trace/setting",
            "/v2/models/{model}/trace/setting",
            f"{_MEMORY}/status",
            f"{_MEMORY}/register",
            f"{_MEMORY}/unregister",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ),
        ADMIN,
    ),
}

_SERVICE = "/inference.GRPCInferenceService/"
_KINDS = {
    PROBE: ("ServerLive", "ServerReady", "ModelReady"),
    USER: (
        "ModelInfer",
        "ModelStreamInfer",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
    ),
    ADMIN: (
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    ),
}
GRPC: dict[str, str] = {
    **{f"{_SERVICE}{name}": kind for kind, names in _KINDS.items() for name in names},
    "/grpc.health.v1.Health/Check": PROBE,
    "/grpc.health.v1.Health/Watch": PROBE,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": USER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": USER,
}
