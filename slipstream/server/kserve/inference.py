"""What passes between a protocol and a model: a request of tensors, a stream of answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.metrics.histograms import TokenLatencies
from slipstream.server.tracing.tracing import RequestTrace

if TYPE_CHECKING:
    from slipstream.engine.messages import Timing
    from slipstream.server.engine_link.engine import TextOutput, TextRequest

Parameter = str | int | float | bool


@dataclass(slots=True)
class RequestTimes:
    """When a request passed each stage, by `time.monotonic_ns()`. A model marks what it knows; 0 is
    not marked.

    Whoever counts requests attends to it; where nobody does, the marks go nowhere.
    """

    began_ns: int = 0
    queue_ended_ns: int = 0  # the model took it out of its queue
    # spent in an engine's queue, where its end was told; of several sequences the longest
    engine_queue_ns: int = 0
    input_ended_ns: int = 0  # its inputs are ready to compute with
    infer_ended_ns: int = 0  # computed; what is left is to write the answer
    first_answer_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache_hit_ns: int = 0  # what finding the answer took, where it was there already
    cache_miss_ns: int = 0  # what looking for it and keeping it took, where it was not
    trace: RequestTrace | None = None  # where somebody wants to read later how it went
    # of the requests this one was taken apart into
    branches: list[RequestTimes] = field(default_factory=list)
    _executing: Callable[[], None] | None = None
    _latencies: TokenLatencies | None = None

    def attend(
        self, executing: Callable[[], None], latencies: TokenLatencies, began_ns: int
    ) -> None:
        self._executing, self._latencies, self.began_ns = executing, latencies, began_ns

    def part(self) -> None:
        """From whoever attended: the two must not keep each other, and all the request's tensors,
        in memory.
        """
        for times in (self, *self.branches):
            times._executing = None

    def branch(self) -> RequestTimes:
        """The times of one batch item: its tokens are its own, what is counted is counted with the
        whole.
        """
        made = RequestTimes(self.began_ns, _executing=self._executing, _latencies=self._latencies)
        self.branches.append(made)
        return made

    @property
    def generated(self) -> list[RequestTimes]:
        """The times of what was generated: this one, or those of its batch items."""
        return [part for part in (self, *self.branches) if part.prompt_tokens]

    def leave_queue(self) -> None:
        self.queue_ended_ns = time.monotonic_ns()
        self.execute()

    def end_input(self) -> None:
        self.input_ended_ns = time.monotonic_ns()

    def end_infer(self) -> None:
        self.infer_ended_ns = time.monotonic_ns()

    def execute(self) -> None:
        """The request no longer waits for its turn."""
        if self._executing is not None:
            self._executing()

    def add_tokens(self, prompt_tokens: int, count: int, timing: Timing | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        if timing is not None and timing.first_scheduled_ns:
            self.engine_queue_ns = max(
                self.engine_queue_ns, timing.first_scheduled_ns - timing.arrived_ns
            )
        self.execute()
        if self._latencies is not None and count:
            self._latencies.arrive(self, count)


@dataclass(slots=True)
class InferRequest:
    model_name: str
    model_version: str
    inputs: dict[str, Tensor]
    id: str = ""
    # without those that have a field below
    parameters: dict[str, Parameter] = field(default_factory=dict)
    times: RequestTimes = field(default_factory=RequestTimes)
    outputs: tuple[str, ...] = ()  # the ones asked for; none named means all
    priority: int = 0  # 1 is the most urgent, 0 the model's default
    timeout_microseconds: int = 0  # 0: none
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    # tells the connection it came over, where the protocol keeps to one
    peer: Callable[[], str] | None = None
    # in place of inputs, from a protocol without tensors to a model of text
    text: TextRequest | None = None


@dataclass(slots=True)
class InferResponse:
    """One answer: tensors, or an error. An error is not the end, more may follow.

    `final` is set by a model that knows, as it answers, that nothing follows. One that ends without
    it has an end of its own, which clients see only when they ask for it.
    """

    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: InferenceError | None = None
    final: bool = False
    text_output: TextOutput | None = None  # in place of outputs, where the request had a `text`


class Answers(Protocol):
    """The answers to one request, as they come. Closing them early gives the request up, at once.

    Most models write an asynchronous generator; one that answers thousands of times a second is
    spared its cost.
    """

    def __aiter__(self) -> AsyncIterator[InferResponse]: ...

    def __anext__(self) -> Awaitable[InferResponse]: ...

    def aclose(self) -> Awaitable[None]: ...


class ServedModel(Protocol):
    """Something that answers."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def decoupled(self) -> bool:
        """May answer any number of times, not exactly once."""
        ...

    @property
    def ready(self) -> bool: ...

    def infer(self, request: InferRequest) -> Answers: ...


class WrappedModel:
    """Stands around a model, to do something with its requests or answers; the rest is the model's
    own.
    """

    def __init__(self, model: ServedModel) -> None:
        self.inner = model

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    @property
    def decoupled(self) -> bool:
        return self.inner.decoupled

    @property
    def ready(self) -> bool:
        return self.inner.ready


def batch_size(request: InferRequest, config: ModelConfig) -> int:
    if config.max_batch_size == 0:
        return 1
    shapes = [tensor.shape for tensor in request.inputs.values() if tensor.shape]
    return shapes[0][0] if shapes else 1
