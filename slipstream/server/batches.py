"""A request for several prompts at once: taken apart into one request each, and the answers put together again.

The engine batches whatever is in flight, so the parts run side by side. Only a model that answers exactly once can
do this; a decoupled one refuses batches, as upstream does. The queue's limits count here too: one place for every
model that reaches an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import prod
from typing import Any

from slipstream.repository.config import ModelConfig
from slipstream.repository.models import EngineModel
from slipstream.server.errors import Code, InferenceError
from slipstream.server.inference import InferRequest, InferResponse, ServedModel
from slipstream.server.llm_models import Generator
from slipstream.server.queue_policy import check_queue
from slipstream.server.tensors import Tensor

# What fills an output up to the longest of a batch, where it is not the zero of its type; two values: for its two rows.
FILLERS: Mapping[str, int | tuple[int, int]] = {"output_ids": -1, "BAD_WORDS_IDS": (0, -1), "STOP_WORDS_IDS": (0, -1)}
_ZEROS = {"BYTES": b"", "BOOL": False, "FP32": 0.0, "FP64": 0.0, "FP16": 0.0}


class BatchedModel:
    def __init__(self, model: ServedModel, engine: EngineModel, generator: Generator) -> None:
        self.inner = model
        self._engine = engine
        self._generator = generator

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    @property
    def decoupled(self) -> bool:
        return self.inner.decoupled

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @property
    def parts(self) -> Mapping[str, str]:
        """As of the model itself: the repository's models whose work is done there, by phase."""
        return getattr(self.inner, "parts", {})

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        count = _batch_size(request, self.config)
        check_queue(request, count * _sequences(request), self._engine, self._generator.engine)
        if count <= 1 or self.decoupled:
            async with aclosing(self.inner.infer(request)) as responses:
                async for response in responses:
                    yield response
            return
        parts = [self._only(part) for part in split(request, count)]
        answers = await _all_or_first_failure(parts)
        failed = next((answer for answer in answers if answer.error is not None), None)
        own = getattr(self.inner, "fillers", None)
        yield failed or join(answers, {**FILLERS, **(own(request) if own is not None else {})})

    async def _only(self, request: InferRequest) -> InferResponse:
        first: InferResponse | None = None
        async with aclosing(self.inner.infer(request)) as responses:
            async for response in responses:
                first = first or response
        return first or InferResponse(error=InferenceError("the model ended without an answer", Code.INTERNAL))


async def _all_or_first_failure(parts: Sequence[Coroutine[Any, Any, InferResponse]]) -> list[InferResponse]:
    """Every answer. What one part raises ends the others, so that nothing runs on for nobody."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _batch_size(request: InferRequest, config: ModelConfig) -> int:
    shapes = [tensor.shape for tensor in request.inputs.values() if tensor.shape]
    return shapes[0][0] if config.max_batch_size > 0 and shapes else 1


def _sequences(request: InferRequest) -> int:
    """How many generations each prompt becomes; what is no such number is refused later, by name."""
    given = request.inputs.get("num_return_sequences")
    value = request.parameters.get("num_return_sequences") if given is None else given.first
    return value if type(value) is int and value > 0 else 1


def split(request: InferRequest, count: int) -> list[InferRequest]:
    """One request for each batch item; the inputs all have the same first dimension by now."""
    parts = []
    for item in range(count):
        inputs = {name: _slice(tensor, item) for name, tensor in request.inputs.items()}
        parts.append(replace(request, inputs=inputs, trail=request.trail.branch()))
    return parts


def _slice(tensor: Tensor, item: int) -> Tensor:
    width = prod(tensor.shape[1:])
    data = tensor.data[item * width : (item + 1) * width]
    return Tensor(tensor.name, tensor.datatype, (1, *tensor.shape[1:]), data)


def join(answers: Sequence[InferResponse], fillers: Mapping[str, Any] = FILLERS) -> InferResponse:
    """The outputs one after the other; where their shapes differ, all are padded to the longest."""
    outputs = []
    for position, first in enumerate(answers[0].outputs):
        filler = fillers.get(first.name, _ZEROS.get(first.datatype, 0))
        outputs.append(_joined(first, [answer.outputs[position] for answer in answers], filler))
    return InferResponse(outputs, answers[0].parameters)


def _joined(first: Tensor, tensors: Sequence[Tensor], filler: Any) -> Tensor:
    largest = tuple(max(dims) for dims in zip(*(tensor.shape[1:] for tensor in tensors), strict=True))
    data = [value for tensor in tensors for value in _padded(tensor, largest, filler)]
    rows = sum(tensor.shape[0] for tensor in tensors)
    return Tensor(first.name, first.datatype, (rows, *largest), data)


def _padded(tensor: Tensor, dims: tuple[int, ...], filler: Any) -> list[object]:
    if tensor.shape[1:] == dims:
        return tensor.data
    padded: list[object] = []
    for row in range(tensor.shape[0]):
        padded += _pad_row(_slice(tensor, row).data, tensor.shape[1:], dims, filler)
    return padded


def _pad_row(data: list[object], shape: tuple[int, ...], dims: tuple[int, ...], filler: Any) -> list[object]:
    if not dims:
        return data
    width, padded = prod(shape[1:]), []
    for item in range(shape[0]):
        own = filler[item] if isinstance(filler, tuple) else filler
        padded += _pad_row(data[item * width : (item + 1) * width], shape[1:], dims[1:], own)
    return padded + [filler] * (prod(dims) - len(padded))
