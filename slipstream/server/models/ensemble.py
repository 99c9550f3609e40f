"""An ensemble of any models: tensors flow from step to step, each answer of a step sets off those
after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from slipstream.repository.config import EnsembleStep, ModelConfig
from slipstream.repository.ensembles import needed_steps, run_order
from slipstream.server.kserve.errors import InferenceError
from slipstream.server.kserve.inference import InferRequest, InferResponse, RequestTimes
from slipstream.server.kserve.input_checks import check_request
from slipstream.server.kserve.tensors import Tensor
from slipstream.server.models.llm_models import ENSEMBLE_PARAMETERS

if TYPE_CHECKING:
    from slipstream.server.kserve.registry import ModelVersion

Tensors = Mapping[str, Tensor]


class EnsembleModel:
    """`find` looks a step's model up by name and version when a request needs it."""

    def __init__(self, config: ModelConfig, find: Callable[[str, str], ModelVersion]) -> None:
        self.config = config
        self._find = find
        self._order = run_order(config.ensemble_steps, config.input_names)

    @property
    def decoupled(self) -> bool:
        """Told by the steps, whatever the ensemble's own file says."""
        try:
            return self.config.decoupled or any(
                self._model_of(step).model.decoupled for step in self._order
            )
        except InferenceError:
            # a step's model is not loaded, so nothing is answered anyway
            return self.config.decoupled

    @property
    def ready(self) -> bool:
        try:
            return all(self._model_of(step).model.ready for step in self._order)
        except InferenceError:
            return False  # a step's model is not loaded

    def _model_of(self, step: EnsembleStep) -> ModelVersion:
        return self._find(
            step.model_name, "" if step.model_version < 1 else str(step.model_version)
        )

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        wanted = request.outputs or tuple(tensor.name for tensor in self.config.outputs)
        steps = needed_steps(self._order, wanted)
        try:
            async with aclosing(self._run(steps, dict(request.inputs), request)) as flows:
                async for tensors, final in flows:
                    outputs = [_renamed(tensors[name], name) for name in wanted if name in tensors]
                    yield InferResponse(outputs, ENSEMBLE_PARAMETERS, final=final)
        except InferenceError as error:
            # An error ends it: what the steps after the failed one would have worked on does not
            # exist.
            text = f"in ensemble '{self.config.name}', {error.message}"
            yield InferResponse(error=InferenceError(text, error.code), final=True)

    async def _run(
        self, steps: Sequence[EnsembleStep], tensors: Tensors, request: InferRequest
    ) -> AsyncGenerator[tuple[Tensors, bool], None]:
        """All tensors there are once the steps have run, as often as the steps answer, in order.

        The flag is set where nothing can follow: every step on the way has given its last answer.
        """
        if not steps:
            yield tensors, True
            return
        step, entry = steps[0], self._model_of(steps[0])
        step_request = _step_request(step, entry, tensors, request)
        check_request(step_request, entry.model.config)
        async with aclosing(entry.model.infer(step_request)) as responses:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                mapped = _mapped(step, response)
                last = response.final or not entry.model.decoupled
                async with aclosing(self._run(steps[1:], {**tensors, **mapped}, request)) as flows:
                    async for flow, final in flows:
                        yield flow, final and last


def _step_request(
    step: EnsembleStep, entry: ModelVersion, tensors: Tensors, request: InferRequest
) -> InferRequest:
    """What the step is asked: the tensors that are there, and the identity and urgency of the whole
    request.
    """
    inputs = {
        name: _renamed(tensors[source], name)
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
        times=RequestTimes(
            trace=trace.child() if (trace := request.times.trace) is not None else None
        ),
    )


def _mapped(step: EnsembleStep, response: InferResponse) -> Tensors:
    """What a step made, by the ensemble's names. Outputs it did not make are missing further on,
    too.
    """
    made = {tensor.name: tensor for tensor in response.outputs}
    return {
        name: _renamed(made[output], name)
        for output, name in step.output_map.items()
        if output in made
    }


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return (
        tensor if tensor.name == name else Tensor(name, tensor.datatype, tensor.shape, tensor.data)
    )
