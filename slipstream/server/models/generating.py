"""The common part of text and token models: the queue before their engine, and the loop that
answers.

Each token of a streamed request passes at most five async iterators, from the protocol down:

1. `metrics.statistics.CountedResponses` counts the responses,
2. `GeneratingModel.answer` makes responses of outputs,
3. `text.pipeline.TextGenerator.generate` makes text of tokens,
4. `text.sequences.merge_streams` merges the sequences of a request that has several,
5. `engine_link.mailbox.InFlightRequest` receives the engine's outputs.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from slipstream.engine.constraints.guided import FIELD as GUIDE
from slipstream.engine.sampling_params import NO_TOKEN_LEFT
from slipstream.repository.config import ModelConfig, QueuePolicy
from slipstream.repository.models import EngineModel
from slipstream.server.engine_link.engine import (
    AdapterUse,
    EngineUnavailable,
    InFlight,
    StageTimes,
    TextOutput,
    TextRequest,
)
from slipstream.server.fields.adapters import FIELDS as ADAPTER_FIELDS
from slipstream.server.fields.adapters import AdapterRegistry
from slipstream.server.fields.values import RequestFields
from slipstream.server.kserve.errors import (
    Code,
    InferenceError,
    QueueFull,
    ServerFault,
    Unavailable,
)
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    Parameter,
    ResponseStream,
    ServedModel,
    batch_size,
)
from slipstream.server.kserve.joining import THREAD_ABOVE_VALUES
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.batches import BATCH_INDEX, answer_batch
from slipstream.server.models.embeddings import NoEmbeddings, embedding_rule, pooled_request
from slipstream.server.models.generation_outputs import (
    EMBEDDINGS,
    Completion,
    OutputRequest,
    convert_to_16_bit,
    declared_16_bit_outputs,
    rename_and_filter,
    sequence_index,
    side_outputs,
    stack_sequences,
)
from slipstream.server.models.queue_size import default_queue_size
from slipstream.server.text.chat import DEFAULT_CHAT, ChatOptions
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.pipeline import PromptError, TextGenerator

QUEUE_FULL = "Exceeds maximum queue size"
TIMED_OUT = "Request timeout expired"
# priority level of requests without one, where the configuration has no default
DEFAULT_LEVEL = 2
LOWEST_LEVEL = 2**32 - 1  # levels beyond it are equal to it
_LONGEST_TIMEOUT = 2**63 - 1  # microseconds; Triton's field has 64 bits


class Generates(Protocol):
    """A generator of text: `TextGenerator` or `DraftedGenerator`."""

    def generate(self, request: TextRequest) -> AsyncGenerator[TextOutput, None]: ...


@dataclass(frozen=True)
class ServedEngine:
    """An engine model of the repository, with its generator and its adapters."""

    model: EngineModel
    generator: TextGenerator
    adapters: AdapterRegistry
    chat: ChatOptions = DEFAULT_CHAT
    # returns the requests that other front ends have in flight at this engine
    outstanding_elsewhere: Callable[[], int] = lambda: 0

    async def choose_adapter(self, fields: RequestFields) -> AdapterUse | None:
        if any(field in fields for field in ADAPTER_FIELDS):
            return await self.adapters.select(fields)
        return None


# -- the queue before the engine


class Scheduling(NamedTuple):
    priority: int  # the engine runs higher ones first
    deadline: float | None  # on time.monotonic()'s clock


def check_queue(request: InferRequest, count: int, engine: ServedEngine) -> None:
    """Refuse a request of `count` sequences that would make the queue too long."""
    info = engine.generator.client.info
    if info is None:
        return
    most = engine.model.queue_policy.max_queue_size
    if not most:
        most = default_queue_size(info.max_rows, info.max_sequence_tokens)
    outstanding = engine.generator.client.outstanding + engine.outstanding_elsewhere()
    waiting = max(0, outstanding - info.max_rows)
    if waiting + count > most and outstanding + count > info.max_rows:
        raise QueueFull(f"[request id: {request.id or '<id_unknown>'}] {QUEUE_FULL}")


def read_scheduling(request: InferRequest, model: EngineModel) -> Scheduling:
    """Return the priority and the deadline of a request.

    A client's timeout bounds its whole request. The policy's default bounds requests without one.
    """
    given = _whole_number(request, "timeout", request.timeout_microseconds)
    microseconds = min(_timeout(model.queue_policy, given), _LONGEST_TIMEOUT)
    deadline = time.monotonic() + microseconds / 1e6 if microseconds else None
    level = priority_level(
        _whole_number(request, "priority", request.priority),
        model.priority_levels,
        model.default_priority,
    )
    return Scheduling(-min(level, LOWEST_LEVEL), deadline)


def priority_level(given: int, levels: int, default: int) -> int:
    """Return the level of a request, of this many levels (0: any). Lower levels run first."""
    if levels and given > levels:
        given = 0  # as in Triton
    return given or default or DEFAULT_LEVEL


def _timeout(policy: QueuePolicy, given: int) -> int:
    default = policy.default_timeout_microseconds
    if policy.timeout_action == "DELAY":
        default = 0  # a late request is served after the others and never refused
    if default and given and not policy.allow_timeout_override:
        return default
    return given or default


def _whole_number(request: InferRequest, name: str, given: int) -> int:
    """Return `given`, the request's own field; a generate request has it among its parameters."""
    value = given or request.parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise InferenceError(f"{name} must be an integer of 0 or more, got {value!r}")
    return value


def _sequence_count(request: InferRequest) -> int:
    """Return the sequences of each prompt. An invalid number is refused later, by name."""
    if request.text is not None:
        return request.text.sequences
    given = request.inputs.get("num_return_sequences")
    value = request.parameters.get("num_return_sequences") if given is None else given.first
    return value if type(value) is int and value > 0 else 1


def check_output_layer(engine: ServedEngine, request: TextRequest) -> None:
    """Refuse to generate with a model that only computes embeddings or scores."""
    declared = engine.model.engine_config.pooling
    if declared is not None and not declared.generates and not request.sampling.pooling:
        raise InferenceError(
            f"model '{engine.model.name}' has no output layer for tokens: it computes embeddings "
            "or scores (/v1/embeddings, /v1/rerank, /score)"
        )


async def with_embeddings(engine: ServedEngine, call: GenerateCall) -> GenerateCall:
    """Return a call for the embedding of the prompt, if the request asks for one or the model
    computes nothing else.
    """
    wanted = call.outputs
    declared = engine.model.engine_config.pooling
    pools_only = declared is not None and not declared.generates
    if wanted is None or not (EMBEDDINGS in wanted.optional or pools_only):
        return call
    try:
        rule = embedding_rule(engine.model)
    except NoEmbeddings as problem:
        raise InferenceError(f"model '{engine.model.name}' {problem}") from problem
    request = await pooled_request(call.request, rule, engine.generator.tokenizer)
    outputs = replace(
        wanted,
        sampling=request.sampling,
        optional=wanted.optional | {EMBEDDINGS},
        unit_length=rule.normalize,
    )
    return replace(
        call,
        request=request,
        generator=engine.generator,
        completions=call.completions[:1],
        outputs=outputs,
    )


# -- models


class EngineBackedModel(ServedModel):
    """A model over an engine. A request with several batch items is split before it is answered."""

    def __init__(self, config: ModelConfig, engine: ServedEngine) -> None:
        self.config = config
        self.engine = engine

    @property
    def generates(self) -> bool:
        return True

    def infer(self, request: InferRequest) -> ResponseStream:
        count = batch_size(request, self.config)
        if count > 1 and (not self.decoupled or BATCH_INDEX in self.config.output_names):
            return answer_batch(self, request, count)
        return self.answer(request)

    def check_queue(self, request: InferRequest, count: int) -> None:
        """Refuse a request of `count` batch items that is too long for the engine's queue."""
        check_queue(request, count * _sequence_count(request), self.engine)

    @abstractmethod
    def answer(
        self, request: InferRequest, check_queue: bool = True
    ) -> AsyncGenerator[InferResponse, None]:
        """Answer one batch item."""
        ...


class Writer(Protocol):
    """Writes the text or the ids of a completion as tensors, by field name."""

    def has_output(self, output: TextOutput) -> bool:
        """Return whether a stream sends this output."""
        ...

    def write_new(self, completion: Completion, output: TextOutput) -> list[Tensor]:
        """Return the new output, for a response of a stream."""
        ...

    def write_whole(self, completion: Completion) -> list[Tensor]:
        """Return the whole answer."""
        ...


@dataclass(frozen=True)
class GenerateCall:
    """A request that is read and checked: all that the loop needs."""

    request: TextRequest
    generator: Generates
    completions: list[Completion]
    # requested outputs; None: the outputs are passed on as they are, without tensors
    outputs: OutputRequest | None
    writer: Writer
    streaming: bool

    def is_sent(self, output: TextOutput) -> bool:
        """Return whether an output is a response of its own."""
        if not self.streaming or output.beams:
            return False
        if self.writer.has_output(output):
            return True
        wants_end = self.outputs is not None and self.outputs.has_final_values
        return wants_end and bool(output.finish_reason)

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


class GeneratingModel(EngineBackedModel):
    """A model that generates. Subclasses read its requests and choose a writer of its outputs.

    An invalid request is answered with an error response, as by any Triton model. Only an engine
    that accepts no work raises (`Unavailable`), and a server that is at fault (`ServerFault`).
    Closing the iterator cancels the request at once.
    """

    # parameters of every response
    response_parameters: Mapping[str, Parameter] = {}
    # whether the last response says that it is the last
    marks_end = True

    def __init__(
        self, config: ModelConfig, engine: ServedEngine, output_names: Mapping[str, str]
    ) -> None:
        """`output_names`: field → name of the output that the model declares for it."""
        super().__init__(config, engine)
        self.output_names = output_names
        self._16_bit_outputs = declared_16_bit_outputs(config)
        # the outputs of a response beside its text or ids, if the request asks for no values there
        self._constant_outputs: list[Tensor] | None = None

    @property
    def ready(self) -> bool:
        return self.engine.generator.client.ready

    @abstractmethod
    async def read(self, request: InferRequest) -> GenerateCall | InferResponse:
        """Read a request; return a response where nothing needs to be generated."""
        ...

    def explain(self, error: InferenceError, request: InferRequest) -> InferenceError:
        """Return the error as clients see it."""
        return error

    def track(
        self, request: InferRequest
    ) -> AbstractContextManager[Callable[[InFlight], None] | None]:
        """Return a context with the callback for submitted sequences, or None."""
        return nullcontext()

    async def answer(
        self, request: InferRequest, check_queue: bool = True
    ) -> AsyncGenerator[InferResponse, None]:
        try:
            if check_queue:
                self.check_queue(request, 1)
            call = await self.read(request)
            if isinstance(call, InferResponse):
                yield call
                return
            call = await with_embeddings(self.engine, call)
            check_output_layer(self.engine, call.request)
            times = request.times
            times.end_input()
            begun = False
            answered = False
            with self.track(request) as submitted:
                times.stages = StageTimes()
                text_request = replace(call.request, submitted=submitted, stages=times.stages)
                async with aclosing(call.generator.generate(text_request)) as outputs:
                    async for output in outputs:
                        begun = check_output(output, begun, text_request)
                        times.add_tokens(output.prompt_tokens, len(output.tokens), output.timing)
                        completion = call.completions[output.sequence]
                        if call.outputs is None:
                            yield self._pass_on(call, completion, output)
                            continue
                        completion.add(output)
                        if call.is_sent(output):
                            answered = True
                            if call.outputs.wants_logits:
                                yield await self._write_logits(call, [completion], output)
                            else:
                                yield self.write(call, [completion], output)
            times.end_infer()
            if not answered and call.outputs is not None:
                yield await self._write_logits(call, _split_beams(call.completions))
        except (Unavailable, ServerFault):
            raise
        except EngineUnavailable as error:
            raise Unavailable(str(error)) from error
        except (InferenceError, PromptError, TokenizerError) as error:
            if not isinstance(error, InferenceError):
                error = InferenceError(str(error))
            yield InferResponse(error=self.explain(error, request), final=self.marks_end)

    def _pass_on(
        self, call: GenerateCall, completion: Completion, output: TextOutput
    ) -> InferResponse:
        """Return a response without tensors. Its reader merges the outputs."""
        completion.drop_end(output)
        completion.finish_reason = output.finish_reason
        final = bool(output.finish_reason) and call.finished
        return InferResponse(text_output=output, final=final)

    async def _write_logits(
        self, call: GenerateCall, completions: list[Completion], output: TextOutput | None = None
    ) -> InferResponse:
        """Return a response; write it in a thread where it has many logits."""
        if sum(completion.logits_bytes for completion in completions) < 4 * THREAD_ABOVE_VALUES:
            return self.write(call, completions, output)
        return await asyncio.to_thread(self.write, call, completions, output)

    def write(
        self, call: GenerateCall, completions: list[Completion], output: TextOutput | None = None
    ) -> InferResponse:
        """Return a response with a new output, or with the whole completions."""
        assert call.outputs is not None
        if output is not None and len(call.completions) == 1 and not call.outputs.has_values:
            tensors = self._write_plain(call, call.outputs, output)
        else:
            tensors = self._write_tensors(call, call.outputs, completions, output)
        ended = output is None or (bool(output.finish_reason) and call.finished)
        return InferResponse(tensors, self.response_parameters, final=self.marks_end and ended)

    def _write_plain(
        self, call: GenerateCall, wanted: OutputRequest, output: TextOutput
    ) -> list[Tensor]:
        """Return a new output of a request for text or ids only: most of all tokens."""
        completion = call.completions[0]
        tensors = rename_and_filter(call.writer.write_new(completion, output), self.output_names)
        if self._constant_outputs is None:
            placeholders = rename_and_filter(side_outputs(wanted, Completion()), self.output_names)
            self._constant_outputs = convert_to_16_bit(placeholders, self._16_bit_outputs)
        tensors += self._constant_outputs
        return tensors

    def _write_tensors(
        self,
        call: GenerateCall,
        wanted: OutputRequest,
        completions: list[Completion],
        output: TextOutput | None,
    ) -> list[Tensor]:
        sequences = []
        for completion in completions:
            if output is None:
                tensors = call.writer.write_whole(completion)
            else:
                tensors = call.writer.write_new(completion, output)
            sequences.append([*tensors, *side_outputs(wanted, completion)])
        tensors = stack_sequences(sequences)
        if output is not None and len(call.completions) > 1:
            tensors.append(sequence_index(output.sequence))
        tensors = rename_and_filter(tensors, self.output_names, wanted.by_name)
        if self._16_bit_outputs:
            tensors = convert_to_16_bit(tensors, self._16_bit_outputs)
        return tensors


_SUCCESS = ("", "stop", "length")  # finish reasons of requests that run or have succeeded


def _split_beams(completions: list[Completion]) -> list[Completion]:
    """Return one completion for each sequence: the beams of a search, or those given."""
    split: list[Completion] = []
    for completion in completions:
        split += completion.split_beams()
    return split


def check_output(output: TextOutput, begun: bool, request: TextRequest) -> bool:
    """Return whether a token has come, with this output or before (`begun`).

    Raise the error of a request that has failed. A deadline after the first token is no failure:
    it only cuts the answer short.
    """
    begun = begun or bool(output.tokens)
    if output.finish_reason in _SUCCESS:
        return begun
    if output.finish_reason == "timeout" and not begun:
        raise Unavailable(TIMED_OUT)
    if output.lost:
        raise Unavailable(output.error)
    if output.finish_reason == "error":
        adapter = request.adapter
        is_clients = (
            output.error.startswith(GUIDE)
            or output.error == NO_TOKEN_LEFT
            or (adapter is not None and adapter.explains(output.error))
        )
        code = Code.INVALID_ARG if is_clients else Code.INTERNAL
        raise InferenceError(output.error or "the engine failed", code)
    if output.finish_reason == "cancelled":
        raise InferenceError("the request was cancelled", Code.CANCELLED)
    return begun


async def run_to_end(generator: Generates, request: TextRequest) -> None:
    """Run a request and drop its outputs. InferenceError says why it failed."""
    begun = False
    try:
        async with aclosing(generator.generate(request)) as outputs:
            async for output in outputs:
                begun = check_output(output, begun, request)
    except (PromptError, TokenizerError) as error:
        raise InferenceError(str(error)) from error
    except EngineUnavailable as error:
        raise Unavailable(str(error)) from error
