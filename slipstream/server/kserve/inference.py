"""The interface between a protocol and a model: a request of tensors, a stream of responses, a
served model, and the registry that finds one by name and version.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from slipstream.engine.messages import Timing
from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.repository.describe import config_document
from slipstream.server.engine_link.engine import StageTimes, TextOutput, TextRequest
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.kserve.triton_json import leading_integer

Parameter = str | int | float | bool


class RequestTrace(Protocol):
    """Records what happens to one request. Each part of the server adds what it knows."""

    @property
    def context(self) -> str:
        """JSON of the headers that add another request to this trace; empty if unsupported."""
        ...

    def child(self) -> RequestTrace:
        """Return the trace of a request that this request causes, such as a step of an ensemble."""
        ...

    def sibling(self) -> RequestTrace | None:
        """Return the trace of another request of the same call; None if a trace has only one."""
        ...

    def stamp(self, name: str, ns: int = 0) -> None: ...
    def model(self, name: str, version: str, request_id: str) -> None: ...
    def tensors(self, activity: str, tensors: Iterable[Tensor]) -> None: ...
    def generated(self, prompt_tokens: int, output_tokens: int, first_token_ns: int) -> None: ...
    def fail(self, kind: str) -> None: ...
    def finish(self) -> None: ...


class TokenRecorder(Protocol):
    """Records the latencies of tokens; `TokenLatencies` of the metrics does."""

    def arrive(self, times: RequestTimes, count: int) -> None: ...


@dataclass(slots=True)
class RequestTimes:
    """The times at which a request reached each stage, by `time.monotonic_ns()`; 0: not reached, or
    not known.

    A model sets the times that it knows. `attach` connects the counters of the model.
    """

    began_ns: int = 0
    queue_ended_ns: int = 0  # the model took the request out of its queue
    # time in the engine's queue; for several sequences the longest
    engine_queue_ns: int = 0
    input_ended_ns: int = 0  # the inputs are ready
    infer_ended_ns: int = 0  # the computation is done; only the response is left to write
    first_answer_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache_hit_ns: int = 0  # duration of a lookup that found the response in the response cache
    cache_miss_ns: int = 0  # duration of a lookup without success and of the insertion
    trace: RequestTrace | None = None  # None: the request is not traced
    stages: StageTimes | None = None  # set by models that generate text
    ensemble: RequestTimes | None = None  # the request that this one is a step of
    # durations of the steps of an ensemble: compute_input, compute_infer and compute_output
    step_durations: tuple[int, ...] = ()
    # times of the batch items that the request was split into
    branches: list[RequestTimes] = field(default_factory=list)
    _on_execute: Callable[[], None] | None = None
    _latencies: TokenRecorder | None = None

    def attach(
        self, on_execute: Callable[[], None], latencies: TokenRecorder, began_ns: int
    ) -> None:
        """Call `on_execute` when the request leaves the queue, and record its tokens."""
        self._on_execute = on_execute
        self._latencies = latencies
        self.began_ns = began_ns

    def detach(self) -> None:
        """Drop the callback. A reference cycle would keep the request's tensors in memory."""
        for times in (self, *self.branches):
            times._on_execute = None

    def branch(self) -> RequestTimes:
        """Return the times of one batch item, which are counted together with the request's."""
        branch = RequestTimes(
            self.began_ns, _on_execute=self._on_execute, _latencies=self._latencies
        )
        self.branches.append(branch)
        return branch

    @property
    def generated(self) -> list[RequestTimes]:
        """The times of each prompt that was generated for: its own, or those of its branches."""
        return [part for part in (self, *self.branches) if part.prompt_tokens]

    def leave_queue(self) -> None:
        self.queue_ended_ns = time.monotonic_ns()
        self.execute()

    def end_input(self) -> None:
        self.input_ended_ns = time.monotonic_ns()

    def end_infer(self) -> None:
        self.infer_ended_ns = time.monotonic_ns()

    def add_to_ensemble(self, spent: Sequence[int]) -> None:
        """Add the durations of a step to its ensemble: queue, compute_input, infer and output."""
        if self.ensemble is not None:
            before = self.ensemble.step_durations or (0, 0, 0)
            added = zip(before, spent[1:], strict=True)
            self.ensemble.step_durations = tuple(map(sum, added))

    def execute(self) -> None:
        """Note that the request no longer waits in the queue."""
        if self._on_execute is not None:
            on_execute = self._on_execute
            self._on_execute = None  # once is enough
            on_execute()

    def add_tokens(self, prompt_tokens: int, count: int, timing: Timing | None = None) -> None:
        """Record that `count` new tokens have arrived."""
        self.prompt_tokens = prompt_tokens
        if timing is not None and timing.first_scheduled_ns:
            waited = timing.first_scheduled_ns - timing.arrived_ns
            self.engine_queue_ns = max(self.engine_queue_ns, waited)
        self.execute()
        if self._latencies is not None and count:
            self._latencies.arrive(self, count)


@dataclass(slots=True)
class InferRequest:
    model_name: str
    model_version: str
    inputs: dict[str, Tensor]
    id: str = ""
    # parameters of the request without those that have a field below
    parameters: dict[str, Parameter] = field(default_factory=dict)
    times: RequestTimes = field(default_factory=RequestTimes)
    outputs: tuple[str, ...] = ()  # names of the requested outputs; empty: all
    priority: int = 0  # 1 is the highest, 0 the model's default
    timeout_microseconds: int = 0  # 0: none
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    # returns the id of the connection, where the protocol keeps to one
    peer: Callable[[], str] | None = None
    # request of a protocol without tensors to a text model; there are no inputs then
    text: TextRequest | None = None


@dataclass(slots=True)
class InferResponse:
    """One response: tensors, or an error. More may follow, also after an error.

    `final` is set by a model that knows that nothing follows. A model that ends without it has an
    empty last response, which clients see only on request.
    """

    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: InferenceError | None = None
    final: bool = False
    # the response to a request with `text`; there are no outputs then
    text_output: TextOutput | None = None


class ResponseStream(Protocol):
    """The responses to one request as they come. Closing it early cancels the request at once.

    Most models write an async generator. A class is faster, for thousands of responses a second.
    """

    def __aiter__(self) -> AsyncIterator[InferResponse]: ...

    def __anext__(self) -> Awaitable[InferResponse]: ...

    def aclose(self) -> Awaitable[None]: ...


class ServedModel(ABC):
    """A model that answers requests, and what the server needs to know about it.

    The defaults are those of a model that answers each request exactly once.
    """

    config: ModelConfig

    @property
    def decoupled(self) -> bool:
        """Return whether a request may have any number of responses."""
        return False

    @property
    def ready(self) -> bool:
        return True

    @property
    def composing_models(self) -> Mapping[str, str]:
        """The models of the repository whose work this model does, by phase of the request."""
        return {}

    @property
    def generates(self) -> bool:
        """Return whether it uses an engine or its tokenizer. The response cache is not for such
        models.
        """
        return False

    @property
    def cached(self) -> bool:
        """Return whether its responses come from the response cache where possible."""
        return False

    @property
    def outstanding(self) -> int:
        """The number of requests that the model's own processes work on."""
        return 0

    @property
    def unwrapped(self) -> ServedModel:
        """The model itself, without what is wrapped around it."""
        return self

    def check_served_here(self, request: InferRequest) -> None:
        """Raise NeedsPrimary where only the primary front end can answer this request."""
        return

    def fillers(self, request: InferRequest) -> Mapping[str, Any]:
        """Return the values that fill the outputs of a batch to one length, by output name."""
        return {}

    @abstractmethod
    def infer(self, request: InferRequest) -> ResponseStream: ...

    async def close(self) -> None:
        """End the processes that the model runs."""
        return None


class WrappedModel(ServedModel):
    """A model around another one. It changes how requests are answered, and nothing else."""

    def __init__(self, model: ServedModel) -> None:
        self.inner = model
        self.config = model.config

    @property
    def decoupled(self) -> bool:
        return self.inner.decoupled

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @property
    def composing_models(self) -> Mapping[str, str]:
        return self.inner.composing_models

    @property
    def generates(self) -> bool:
        return self.inner.generates

    @property
    def cached(self) -> bool:
        return self.inner.cached

    @property
    def outstanding(self) -> int:
        return self.inner.outstanding

    @property
    def unwrapped(self) -> ServedModel:
        return self.inner.unwrapped

    def fillers(self, request: InferRequest) -> Mapping[str, Any]:
        return self.inner.fillers(request)

    async def close(self) -> None:
        await self.inner.close()


def batch_size(request: InferRequest, config: ModelConfig) -> int:
    """Return the number of batch items of a request."""
    if config.max_batch_size == 0:
        return 1
    shapes = [tensor.shape for tensor in request.inputs.values() if tensor.shape]
    return shapes[0][0] if shapes else 1


class ModelVersion(NamedTuple):
    name: str
    version: str
    model: ServedModel


Wrapper = Callable[[ModelVersion], ServedModel]


def read_version(text: str) -> int:
    """Return the number of a version, which Triton keeps in 64 bits. Raises InferenceError."""
    version = leading_integer(text)
    if version is None or not -(2**63) <= version < 2**63:
        raise InferenceError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    if version < 0:
        raise InferenceError(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return version


class ModelRegistry:
    def __init__(self) -> None:
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._retired: set[str] = set()  # names of models that were unloaded or failed to load
        self._wrappers: list[Wrapper] = []

    def add(self, name: str, version: int, model: ServedModel) -> None:
        self._models.setdefault(name, {})[version] = self._wrapped(name, version, model)

    def replace(self, name: str, versions: Mapping[int, ServedModel]) -> None:
        """Replace all versions of a model at once: requests see the old ones or the new ones."""
        wrapped = {
            version: self._wrapped(name, version, model) for version, model in versions.items()
        }
        self._models[name] = wrapped

    def retire(self, name: str) -> None:
        """Remove a model, or note that one failed to load: it has no available versions."""
        self._models.pop(name, None)
        self._retired.add(name)

    def __iter__(self) -> Iterator[ModelVersion]:
        for name, versions in sorted(self._models.items()):
            for version, model in sorted(versions.items()):
                yield ModelVersion(name, str(version), model)

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def wrap(self, wrapper: Wrapper) -> None:
        """Wrap every model, for example with a counter, also those that are added later."""
        self._wrappers.append(wrapper)
        for entry in list(self):
            self._models[entry.name][int(entry.version)] = wrapper(entry)

    def _wrapped(self, name: str, version: int, model: ServedModel) -> ServedModel:
        for wrapper in self._wrappers:
            model = wrapper(ModelVersion(name, str(version), model))
        return model

    def find(self, name: str, version: str = "") -> ModelVersion:
        """Return the model in this version, or the latest. Raises InferenceError."""
        versions = self._models.get(name)
        if versions is None:
            what = "has no available versions" if name in self._retired else "is not found"
            raise InferenceError(f"Request for unknown model: '{name}' {what}", Code.NOT_FOUND)
        if not version:
            latest = max(versions)
            return ModelVersion(name, str(latest), versions[latest])
        model = versions.get(read_version(version))
        if model is None:
            raise InferenceError(
                f"Request for unknown model: '{name}' version {version} is not found",
                Code.NOT_FOUND,
            )
        return ModelVersion(name, str(int(version)), model)

    def is_ready(self, name: str, version: str = "") -> bool:
        try:
            return self.find(name, version).model.ready
        except InferenceError:
            return False  # an unknown model is not ready

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        entry = self.find(name, version)
        config = entry.model.config
        batch = (-1,) if config.max_batch_size > 0 else ()
        return {
            "name": name,
            "versions": [version] if version else [str(one) for one in sorted(self._models[name])],
            "platform": config.platform or config.backend,
            "inputs": [_tensor(tensor, batch) for tensor in config.inputs],
            "outputs": [_tensor(tensor, batch) for tensor in config.outputs],
        }

    def configuration(self, name: str, version: str = "") -> dict[str, Any]:
        entry = self.find(name, version)
        return config_document(entry.model.config, entry.model.decoupled)


def _tensor(tensor: TensorConfig, batch: tuple[int, ...]) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [*batch, *tensor.dims]}
