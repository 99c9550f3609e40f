"""Requests with several batch items: each item is answered on its own, and the answers are joined.

The engine batches all requests in flight, so the items run side by side. A decoupled model sends
the responses of all items as they come, each with its index, where the model declares an output
for the index (as TensorRT-LLM's do since 0.12). Other decoupled models refuse batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from math import prod
from typing import Any, Protocol

from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.joining import THREAD_ABOVE_VALUES, one_after_another
from slipstream.server.kserve.tensors import Tensor, count_values
from slipstream.server.text.sequences import merge_streams

BATCH_INDEX = "batch_index"
# Values that fill the outputs of a batch to one length, where it is not the zero of their type.
# Two values are for the two rows of an output.
FILLERS: Mapping[str, int | tuple[int, int]] = {
    "output_ids": -1,
    "BAD_WORDS_IDS": (0, -1),
    "STOP_WORDS_IDS": (0, -1),
}
_ZEROS = {"BYTES": b"", "BOOL": False, "FP32": 0.0, "FP64": 0.0, "FP16": 0.0}


class SplitModel(Protocol):
    """A model that answers one batch item at a time."""

    @property
    def decoupled(self) -> bool: ...

    def fillers(self, request: InferRequest) -> Mapping[str, Any]: ...
    def check_queue(self, request: InferRequest, count: int) -> None: ...
    def answer(
        self, request: InferRequest, check_queue: bool = True
    ) -> AsyncGenerator[InferResponse, None]: ...


async def answer_batch(
    model: SplitModel, request: InferRequest, count: int
) -> AsyncGenerator[InferResponse, None]:
    """Answer a request of `count` batch items."""
    model.check_queue(request, count)
    items = split(request, count)
    if model.decoupled:
        async with aclosing(_answer_separately(model, items)) as responses:
            async for response in responses:
                yield response
        return
    answers = await _all_or_first_failure([_only_response(model, item) for item in items])
    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None:
        yield failed
        return
    fillers = {**FILLERS, **model.fillers(request)}
    if sum(count_values(answer.outputs) for answer in answers) < THREAD_ABOVE_VALUES:
        yield join(answers, fillers)
    else:  # on the event loop it would delay other requests
        yield await asyncio.to_thread(join, answers, fillers)


async def _answer_separately(
    model: SplitModel, items: Sequence[InferRequest]
) -> AsyncGenerator[InferResponse, None]:
    """Yield the responses to all items as they come. The last one of all items is final."""
    ended: set[int] = set()
    async with AsyncExitStack() as stack:
        answers = [
            await stack.enter_async_context(aclosing(model.answer(item, check_queue=False)))
            for item in items
        ]
        async for index, answer in merge_streams(answers):
            if answer.final:
                ended.add(index)
            outputs = answer.outputs
            if answer.error is None:
                outputs = [*outputs, Tensor.from_values(BATCH_INDEX, "INT32", (1, 1), [index])]
            yield replace(answer, outputs=outputs, final=len(ended) == len(items))


async def _only_response(model: SplitModel, request: InferRequest) -> InferResponse:
    first: InferResponse | None = None
    async with aclosing(model.answer(request, check_queue=False)) as responses:
        async for response in responses:
            first = first or response
    return first or InferResponse(
        error=InferenceError("the model ended without an answer", Code.INTERNAL)
    )


async def _all_or_first_failure(
    items: Sequence[Coroutine[Any, Any, InferResponse]],
) -> list[InferResponse]:
    """Return all answers. An exception of one item cancels the others."""
    tasks = [asyncio.ensure_future(item) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def split(request: InferRequest, count: int) -> list[InferRequest]:
    """Return a request for each batch item. All inputs have the same first dimension."""
    items = []
    for item in range(count):
        inputs = {name: _slice(tensor, item) for name, tensor in request.inputs.items()}
        items.append(replace(request, inputs=inputs, times=request.times.branch()))
    return items


def _slice(tensor: Tensor, item: int) -> Tensor:
    width = prod(tensor.shape[1:])
    data = tensor.data[item * width : (item + 1) * width]
    return Tensor(tensor.name, tensor.datatype, (1, *tensor.shape[1:]), data)


def join(answers: Sequence[InferResponse], fillers: Mapping[str, Any] = FILLERS) -> InferResponse:
    """Return one response with the outputs of all; shorter outputs are padded to the longest."""
    outputs = []
    for position, first in enumerate(answers[0].outputs):
        filler = fillers.get(first.name, _ZEROS.get(first.datatype, 0))
        outputs.append(_join_tensors([answer.outputs[position] for answer in answers], filler))
    return InferResponse(outputs, answers[0].parameters)


def _join_tensors(tensors: Sequence[Tensor], filler: Any) -> Tensor:
    first = tensors[0]
    shapes = [tensor.shape[1:] for tensor in tensors]
    largest = tuple(max(dims) for dims in zip(*shapes, strict=True))
    rows = sum(tensor.shape[0] for tensor in tensors)
    return Tensor(
        first.name, first.datatype, (rows, *largest), one_after_another(tensors, largest, filler)
    )
