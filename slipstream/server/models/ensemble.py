"""An ensemble of any models: each response of a step runs the steps after it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from slipstream.repository.config import EnsembleStep, ModelConfig
from slipstream.repository.ensembles import needed_steps, run_order
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import (
    InferRequest,
    InferResponse,
    RequestTimes,
    ServedModel,
)
from slipstream.server.kserve.input_checks import check_request
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.text_model import ENSEMBLE_PARAMETERS

if TYPE_CHECKING:
    from slipstream.server.kserve.inference import ModelVersion

Tensors = Mapping[str, Tensor]


class EnsembleModel(ServedModel):
    """`find` looks a step's model up by name and version when a request needs it."""

    def __init__(self, config: ModelConfig, find: Callable[[str, str], ModelVersion]) -> None:
        self.config = config
        self._find = find
        self._order = run_order(config.ensemble_steps, config.input_names)

    @property
    def decoupled(self) -> bool:
        """Return whether a step is decoupled, or the ensemble's own configuration says so."""
        try:
            return self.config.decoupled or any(
                self._find_model(step).model.decoupled for step in self._order
            )
        except InferenceError:
            # a step's model is not loaded, so every request fails
            return self.config.decoupled

    @property
    def ready(self) -> bool:
        try:
            return all(self._find_model(step).model.ready for step in self._order)
        except InferenceError:
            return False  # a step's model is not loaded

    def _find_model(self, step: EnsembleStep) -> ModelVersion:
        return self._find(
            step.model_name, "" if step.model_version < 1 else str(step.model_version)
        )

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        wanted = request.outputs or tuple(tensor.name for tensor in self.config.outputs)
        steps = needed_steps(self._order, wanted)
        try:
            async with aclosing(self._run(steps, dict(request.inputs), request)) as flows:
                async for tensors, final in flows:
                    outputs = [_rename(tensors[name], name) for name in wanted if name in tensors]
                    yield InferResponse(outputs, ENSEMBLE_PARAMETERS, final=final)
        except InferenceError as error:
            # The steps after the failed one have no inputs, so an error is the end.
            text = f"in ensemble '{self.config.name}', {error.message}"
            yield InferResponse(error=InferenceError(text, error.code), final=True)

    async def _run(
        self, steps: Sequence[EnsembleStep], tensors: Tensors, request: InferRequest
    ) -> AsyncGenerator[tuple[Tensors, bool], None]:
        """Yield all tensors after the steps have run, once for each response of the last step.

        The flag is set where nothing can follow: each step has sent its last response.
        """
        if not steps:
            yield tensors, True
            return
        step = steps[0]
        entry = self._find_model(step)
        step_request = _step_request(step, entry, tensors, request)
        check_request(step_request, entry.model.config)
        async with aclosing(entry.model.infer(step_request)) as responses:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                mapped = _map_outputs(step, response)
                last = response.final or not entry.model.decoupled
                async with aclosing(self._run(steps[1:], {**tensors, **mapped}, request)) as flows:
                    async for flow, final in flows:
                        yield flow, final and last


def _step_request(
    step: EnsembleStep, entry: ModelVersion, tensors: Tensors, request: InferRequest
) -> InferRequest:
    """Return the request of a step: its input tensors, and the id and priority of the request."""
    trace = request.times.trace
    inputs = {
        name: _rename(tensors[source], name)
        for name, source in step.input_map.items()
        if source in tensors
    }
    return InferRequest(
        model_name=entry.name,
        model_version=entry.version,
        inputs=inputs,
        id=request.id,
        parameters=dict(request.parameters),
        outputs=tuple(step.output_map),
        priority=request.priority,
        timeout_microseconds=request.timeout_microseconds,
        sequence_id=request.sequence_id,
        sequence_start=request.sequence_start,
        sequence_end=request.sequence_end,
        times=RequestTimes(trace=None if trace is None else trace.child(), ensemble=request.times),
    )


def _map_outputs(step: EnsembleStep, response: InferResponse) -> Tensors:
    """Return the outputs of a step by the ensemble's names, without those that it did not send."""
    outputs = {tensor.name: tensor for tensor in response.outputs}
    return {
        name: _rename(outputs[output], name)
        for output, name in step.output_map.items()
        if output in outputs
    }


def _rename(tensor: Tensor, name: str) -> Tensor:
    return (
        tensor if tensor.name == name else Tensor(name, tensor.datatype, tensor.shape, tensor.data)
    )
