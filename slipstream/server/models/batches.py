"""A request for several prompts at once: taken apart into one request each, and the answers put
together again.

The engine batches whatever is in flight, so the parts run side by side. The answers of a decoupled
model stay apart, and each says which part it is of, where the model declares the output for that
(as upstream's do since 0.12); one that does not refuses batches, as upstream did before. The
queue's limits count here too: one place for every model that reaches an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from math import prod
from typing import Any

from slipstream.repository.models import EngineModel
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    ServedModel,
    WrappedModel,
    batch_size,
)
from slipstream.server.kserve.joining import LONG, numbers, one_after_another
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.llm_models import Generator
from slipstream.server.models.queue_policy import check_queue
from slipstream.server.text.sequences import merge_streams

INDEX = "batch_index"
# What fills an output up to the longest of a batch, where it is not the zero of its type; two
# values: for its two rows.
FILLERS: Mapping[str, int | tuple[int, int]] = {
    "output_ids": -1,
    "BAD_WORDS_IDS": (0, -1),
    "STOP_WORDS_IDS": (0, -1),
}
_ZEROS = {"BYTES": b"", "BOOL": False, "FP32": 0.0, "FP64": 0.0, "FP16": 0.0}


class BatchedModel(WrappedModel):
    def __init__(self, model: ServedModel, engine: EngineModel, generator: Generator) -> None:
        super().__init__(model)
        self._engine = engine
        self._generator = generator

    @property
    def parts(self) -> Mapping[str, str]:
        """As of the model itself: the repository's models whose work is done there, by phase."""
        return getattr(self.inner, "parts", {})

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        count = batch_size(request, self.config)
        check_queue(request, count * _sequences(request), self._engine, self._generator.engine)
        apart = self.decoupled and INDEX in self.config.output_names
        if count > 1 and apart:
            async for response in self._apart(split(request, count)):
                yield response
            return
        if count <= 1 or self.decoupled:
            async with aclosing(self.inner.infer(request)) as responses:
                async for response in responses:
                    yield response
            return
        parts = [self._only(part) for part in split(request, count)]
        answers = await _all_or_first_failure(parts)
        failed = next((answer for answer in answers if answer.error is not None), None)
        if failed is not None:
            yield failed
            return
        own = getattr(self.inner, "fillers", None)
        fillers = {**FILLERS, **(own(request) if own is not None else {})}
        if sum(numbers(answer.outputs) for answer in answers) < LONG:
            yield join(answers, fillers)
        else:  # others' answers would wait for it
            yield await asyncio.to_thread(join, answers, fillers)

    async def _apart(self, parts: Sequence[InferRequest]) -> AsyncGenerator[InferResponse, None]:
        """The answers to all parts as they come. The last one of them all is the last."""
        ended: set[int] = set()
        async with AsyncExitStack() as stack:
            answers = [
                await stack.enter_async_context(aclosing(self.inner.infer(part))) for part in parts
            ]
            async for index, answer in merge_streams([aiter(source) for source in answers]):
                if answer.final:
                    ended.add(index)
                outputs = answer.outputs
                if answer.error is None:
                    outputs = [*outputs, Tensor.from_values(INDEX, "INT32", (1, 1), [index])]
                yield replace(answer, outputs=outputs, final=len(ended) == len(parts))

    async def _only(self, request: InferRequest) -> InferResponse:
        first: InferResponse | None = None
        async with aclosing(self.inner.infer(request)) as responses:
            async for response in responses:
                first = first or response
        return first or InferResponse(
            error=InferenceError("the model ended without an answer", Code.INTERNAL)
        )


async def _all_or_first_failure(
    parts: Sequence[Coroutine[Any, Any, InferResponse]],
) -> list[InferResponse]:
    """Every answer. What one part raises ends the others, so that nothing runs on for nobody."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sequences(request: InferRequest) -> int:
    """How many generations each prompt becomes; what is no such number is refused later, by name."""
    if request.text is not None:
        return request.text.sequences
    given = request.inputs.get("num_return_sequences")
    value = request.parameters.get("num_return_sequences") if given is None else given.first
    return value if type(value) is int and value > 0 else 1


def split(request: InferRequest, count: int) -> list[InferRequest]:
    """One request for each batch item; the inputs all have the same first dimension by now."""
    parts = []
    for item in range(count):
        inputs = {name: _slice(tensor, item) for name, tensor in request.inputs.items()}
        parts.append(replace(request, inputs=inputs, times=request.times.branch()))
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
        outputs.append(_joined([answer.outputs[position] for answer in answers], filler))
    return InferResponse(outputs, answers[0].parameters)


def _joined(tensors: Sequence[Tensor], filler: Any) -> Tensor:
    first = tensors[0]
    largest = tuple(
        max(dims) for dims in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)
    )
    rows = sum(tensor.shape[0] for tensor in tensors)
    return Tensor(
        first.name, first.datatype, (rows, *largest), one_after_another(tensors, largest, filler)
    )
