"""The calls besides inference: server and models, the repository, logs, traces, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format

from slipstream.server.grpc.infer import version_number
from slipstream.server.grpc.protocol.messages import method_messages
from slipstream.server.kserve.context import ServerContext
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.health import ServerState
from slipstream.server.kserve.inference import ModelRegistry
from slipstream.server.kserve.log_settings import (
    check_format,
    check_setting_types,
    log_settings,
    update_log_settings,
)
from slipstream.server.kserve.repository_control import (
    FILE_PREFIX,
    LoadParameters,
    RepositoryControl,
    check_repository_name,
    load_model,
)
from slipstream.server.kserve.server_metadata import EXTENSIONS, TRITON_VERSION
from slipstream.server.kserve.shared_memory import CUDA_HANDLE_BYTES, SharedMemory
from slipstream.server.kserve.triton_json import leading_integer
from slipstream.server.metrics.statistics_api import model_statistics

TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")


def _answer(name: str, /, **fields: Any) -> Any:
    return method_messages(name)[1](**fields)


class Description:
    """The server and its models."""

    def __init__(self, registry: ModelRegistry, state: ServerState, shared: ServerContext) -> None:
        self._registry = registry
        self._state = state
        self._server_name = shared.server_name
        self._shared = shared

    async def server_live(self, request: Any) -> Any:
        return _answer("ServerLive", live=self._state.live)

    async def server_ready(self, request: Any) -> Any:
        return _answer("ServerReady", ready=self._state.ready)

    async def model_ready(self, request: Any) -> Any:
        ready = self._registry.is_ready(request.name, version_number(request.version))
        return _answer("ModelReady", ready=ready)

    async def server_metadata(self, request: Any) -> Any:
        return _answer(
            "ServerMetadata", name=self._server_name, version=TRITON_VERSION, extensions=EXTENSIONS
        )

    async def model_metadata(self, request: Any) -> Any:
        return _answer(
            "ModelMetadata",
            **self._registry.metadata(request.name, version_number(request.version)),
        )

    async def model_config(self, request: Any) -> Any:
        document = self._registry.configuration(request.name, version_number(request.version))
        answer = _answer("ModelConfig")
        json_format.ParseDict(document, answer.config)
        return answer

    async def model_statistics(self, request: Any) -> Any:
        await self._shared.collect_statistics()
        found = model_statistics(self._registry, request.name, version_number(request.version))
        return _answer("ModelStatistics", model_stats=found)


class RepositoryCalls:
    def __init__(self, control: RepositoryControl) -> None:
        self._control = control

    async def index(self, request: Any) -> Any:
        check_repository_name(request.repository_name)
        return _answer("RepositoryIndex", models=self._control.index(request.ready))

    async def load(self, request: Any) -> Any:
        check_repository_name(request.repository_name)
        parameters = LoadParameters()
        for name, parameter in request.parameters.items():
            if name == "config":
                parameters.config = _load_parameter(name, parameter, "string_param")
            elif name.startswith(FILE_PREFIX):
                parameters.files[name] = _load_parameter(name, parameter, "bytes_param")
            else:
                raise InferenceError(f"unrecognized load parameter '{name}'.")
        await load_model(self._control, request.model_name, parameters)
        return _answer("RepositoryModelLoad")

    async def unload(self, request: Any) -> Any:
        check_repository_name(request.repository_name)
        await self._control.unload(request.model_name, _unload_dependents(request.parameters))
        return _answer("RepositoryModelUnload")


def _load_parameter(name: str, parameter: Any, expected: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != expected:
        raise InferenceError(
            f"invalid value type for load parameter '{name}', expected {expected}."
        )
    return getattr(parameter, expected)


def _unload_dependents(parameters: Any) -> bool:
    name = "unload_dependents"
    if name not in parameters:
        return False
    if parameters[name].WhichOneof("parameter_choice") != "bool_param":
        raise InferenceError(f"invalid value type for '{name}' parameter, expected bool_param.")
    return bool(parameters[name].bool_param)


def _value(parameter: Any) -> Any:
    """Return the value of a parameter, None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _trace_value(name: str, values: Sequence[str]) -> list[str] | str | None:
    """Return the value of a trace setting. None, for no values, undoes earlier changes."""
    if not values:
        return None
    if name == "trace_level":
        if "OFF" in values and len(values) > 1:
            raise InferenceError("Expect only one trace level 'OFF' is specified")
        return list(values)
    if name in TRACE_NUMBERS and len(values) > 1:
        raise InferenceError(f"expect only 1 value for '{name}'")
    number = leading_integer(values[0])
    if name == "trace_count" and number is not None and -(2**31) <= number < -1:
        raise InferenceError(f"Unable to parse '{name}'. Expecting value >= -1, got: {number}")
    return values[0]


class SharedMemoryCalls:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def system_status(self, request: Any) -> Any:
        regions = {region["name"]: region for region in self._memory.status(request.name)}
        return _answer("SystemSharedMemoryStatus", regions=regions)

    async def system_register(self, request: Any) -> Any:
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return _answer("SystemSharedMemoryRegister")

    async def system_unregister(self, request: Any) -> Any:
        self._memory.unregister(request.name)
        return _answer("SystemSharedMemoryUnregister")

    async def cuda_status(self, request: Any) -> Any:
        regions = {region["name"]: region for region in self._memory.cuda_status(request.name)}
        return _answer("CudaSharedMemoryStatus", regions=regions)

    async def cuda_register(self, request: Any) -> Any:
        if len(request.raw_handle) != CUDA_HANDLE_BYTES:
            raise InferenceError("failed to register shared memory region: invalid args")
        self._memory.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        )
        return _answer("CudaSharedMemoryRegister")

    async def cuda_unregister(self, request: Any) -> Any:
        self._memory.unregister_cuda(request.name)
        return _answer("CudaSharedMemoryUnregister")


class SettingCalls:
    """The settings of logs and traces."""

    def __init__(self, registry: ModelRegistry, shared: ServerContext) -> None:
        self._registry = registry
        self._traces = shared.trace
        self._shared = shared

    async def trace_setting(self, request: Any) -> Any:
        name = request.model_name
        if name and not any(entry.name == name for entry in self._registry):
            raise InferenceError(f"Request for unknown model : {name}")
        wanted = {key: _trace_value(key, given.value) for key, given in request.settings.items()}
        found = self._traces.update(wanted, name) if wanted else self._traces.get(name)
        await self._shared.settle()
        answer = _answer("TraceSetting")
        for key, value in found.items():
            answer.settings[key].value.extend(value if isinstance(value, list) else [value])
        return answer

    async def log_settings(self, request: Any) -> Any:
        wanted = {key: _value(setting) for key, setting in request.settings.items()}
        check_setting_types({key: type(value) for key, value in wanted.items()})
        if "log_format" in wanted:
            check_format(wanted["log_format"])
        answer = _answer("LogSettings")
        found = update_log_settings(wanted) if wanted else log_settings()
        await self._shared.settle()
        for key, value in found.items():
            field = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(answer.settings[key], field, value)
        return answer
