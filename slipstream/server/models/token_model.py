"""Models with token ids as inputs and outputs: the engine model itself, by its own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from slipstream.repository.models import RepositoryModel
from slipstream.repository.roles import engine_fields, engine_outputs
from slipstream.server.engine_link.engine import InFlight, TextOutput
from slipstream.server.fields.token_requests import token_request
from slipstream.server.fields.values import check_batch, read_request_fields
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.generating import (
    GenerateCall,
    GeneratingModel,
    ServedEngine,
    read_scheduling,
)
from slipstream.server.models.generation_outputs import Completion, read_output_request
from slipstream.server.models.stop_requests import StopRequests, is_stop_request


class TokenModel(GeneratingModel):
    def __init__(
        self, model: RepositoryModel, engine: ServedEngine, placeholders: bool = True
    ) -> None:
        super().__init__(model.config, engine, engine_outputs(model.config))
        self._placeholders = placeholders
        self._fields = engine_fields(model.config)
        self.stops = StopRequests()

    @property
    def decoupled(self) -> bool:
        return self.engine.model.decoupled

    def track(
        self, request: InferRequest
    ) -> AbstractContextManager[Callable[[InFlight], None] | None]:
        return self.stops.listing(request)

    @property
    def input_fields(self) -> Mapping[str, str]:
        """The request field of each input."""
        return self._fields

    def is_stop_request(self, request: InferRequest) -> bool:
        """Return whether the request stops others."""
        return is_stop_request(request, self._fields)

    async def read(self, request: InferRequest) -> GenerateCall | InferResponse:
        if self.is_stop_request(request):
            self.stops.stop(request)
            return InferResponse(final=True)
        check_batch(request, self.config)
        fields = read_request_fields(request, self._fields)
        model = self.engine.model
        scheduling = read_scheduling(request, model)
        text_request = token_request(fields, model, self.engine.generator.tokenizer)
        outputs = read_output_request(
            fields,
            text_request.sampling,
            set(self._fields.values()),
            self.output_names,
            self._placeholders,
        )
        prompt = text_request.prompt
        text_request = replace(
            text_request,
            sampling=outputs.complete_sampling(text_request.sampling),
            priority=scheduling.priority,
            deadline=scheduling.deadline,
            adapter=await self.engine.choose_adapter(fields),
        )
        end_ids = frozenset(text_request.sampling.end_ids)
        completions = [
            Completion(
                end_ids=end_ids, normalise=model.normalize_log_probs, prompt_scored=index > 0
            )
            for index in range(1 if text_request.sampling.beams else text_request.sequences)
        ]
        streaming = self.decoupled and fields.flag("stream")
        excluded = fields.flag("exclude_input_in_output", model.exclude_input_in_output)
        shown_prompt = [] if streaming or excluded or isinstance(prompt, str) else prompt
        writer = self._choose_writer(request, shown_prompt)
        return GenerateCall(
            text_request,
            self.engine.generator,
            completions,
            outputs,
            writer,
            streaming,
        )

    def _choose_writer(self, request: InferRequest, prompt: list[int]) -> IdWriter:
        """Return a writer that puts `prompt` before the answer."""
        return IdWriter(prompt)


@dataclass(frozen=True)
class IdWriter:
    """Writes token ids."""

    prompt: list[int]  # ids to put before the whole answer

    def has_output(self, output: TextOutput) -> bool:
        return bool(output.tokens)

    def write_new(self, completion: Completion, output: TextOutput) -> list[Tensor]:
        return _id_tensors(output.tokens)

    def write_whole(self, completion: Completion) -> list[Tensor]:
        return _id_tensors([*self.prompt, *completion.tokens])


def _id_tensors(ids: list[int]) -> list[Tensor]:
    return [
        Tensor.from_values("output_ids", "INT32", (1, 1, len(ids)), ids),
        Tensor.from_values("sequence_length", "INT32", (1, 1), [len(ids)]),
    ]


class FixedBatchModel(TokenModel):
    """The engine model of the gpt repository, whose clients send batches and read fixed blocks.

    Ids after the end of an answer are the end id instead of -1, and log-probabilities are the
    output `log_probs` [batch, tokens, beams].
    """

    @property
    def decoupled(self) -> bool:
        return False

    def fillers(self, request: InferRequest) -> Mapping[str, int]:
        return {"output_ids": self._end_id(request)}

    def _end_id(self, request: InferRequest) -> int:
        given = request.inputs.get("end_id")
        if given is None or given.first is None or given.first < 0:
            return self.engine.generator.tokenizer.eos_id or 0
        return int(given.first)

    def _choose_writer(self, request: InferRequest, prompt: list[int]) -> IdWriter:
        return _BlockWriter(prompt, self._end_id(request))

    def write(
        self,
        call: GenerateCall,
        completions: list[Completion],
        output: TextOutput | None = None,
    ) -> InferResponse:
        assert isinstance(call.writer, _BlockWriter)
        response = super().write(call, completions, output)
        blocks = [_as_block(tensor, call.writer.end_id) for tensor in response.outputs]
        return replace(response, outputs=blocks)


@dataclass(frozen=True)
class _BlockWriter(IdWriter):
    end_id: int  # id that fills the ids after the end of an answer


def _as_block(tensor: Tensor, end_id: int) -> Tensor:
    if tensor.name == "output_ids":
        ids = tensor.array()
        return replace(tensor, data=np.where(ids >= 0, ids, ids.dtype.type(end_id)))
    if tensor.name == "log_probs":
        _, beams, tokens = tensor.shape
        by_token = tensor.array().reshape(beams, tokens).T
        return replace(tensor, shape=(1, tokens, beams), data=by_token.reshape(-1))
    return tensor
