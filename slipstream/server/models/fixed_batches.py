"""The engine model of the gpt repository, whose clients send whole batches and read the answer as
one block.

What differs from the in-flight model: ids after an answer's end are the end id, not -1, and
log-probabilities are the tensor `log_probs` [batch, tokens, beams].
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from slipstream.repository.config import ModelConfig
from slipstream.server.kserve.inference import InferRequest, InferResponse
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.llm_models import TokenModel


class FixedBatchModel:
    decoupled = False

    def __init__(self, model: TokenModel, end_id: int) -> None:
        self._model = model
        self._end_id = end_id  # where a request names none

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def ready(self) -> bool:
        return self._model.ready

    def fillers(self, request: InferRequest) -> Mapping[str, int]:
        """What the answers of a batch are filled up with, by output."""
        given = request.inputs.get("end_id")
        end_id = (
            self._end_id if given is None or given.first is None or given.first < 0 else given.first
        )
        return {"output_ids": end_id}

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        end_id = self.fillers(request)["output_ids"]
        async with aclosing(self._model.infer(request)) as responses:
            async for response in responses:
                yield replace(
                    response, outputs=[_as_block(tensor, end_id) for tensor in response.outputs]
                )


def _as_block(tensor: Tensor, end_id: int) -> Tensor:
    if tensor.name == "output_ids":
        ids = tensor.array()
        return replace(tensor, data=np.where(ids >= 0, ids, ids.dtype.type(end_id)))
    if tensor.name == "log_probs":
        _, beams, tokens = tensor.shape
        by_token = tensor.array().reshape(beams, tokens).T
        return replace(tensor, shape=(1, tokens, beams), data=by_token.reshape(-1))
    return tensor
