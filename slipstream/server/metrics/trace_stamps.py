"""The times in a trace: the begin and end of each phase of a model, or of its steps.

Durations are those of `statistics.Spent`: queue, compute_input, compute_infer, compute_output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slipstream.server.kserve.inference import InferRequest, RequestTimes, RequestTrace


class Step(Protocol):
    """A model whose work an ensemble does."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


def begin_trace(trace: RequestTrace, request: InferRequest, began: int) -> None:
    trace.model(request.model_name, request.model_version, request.id)
    trace.stamp("REQUEST_START", began)
    trace.stamp("QUEUE_START", began)
    trace.tensors("TENSOR_QUEUE_INPUT", request.inputs.values())


def end_trace(
    trace: RequestTrace, times: RequestTimes, spent: Sequence[int] | None, ended: int
) -> None:
    """Stamp the phases of a model and the end of its request. An ensemble has no phases (None)."""
    if spent is not None:
        _stamp_phases(trace, spent, times.began_ns, ended)
    trace.stamp("REQUEST_END", ended)
    if generated := times.generated:
        firsts = [part.first_token_ns for part in generated if part.first_token_ns]
        prompt_tokens = sum(part.prompt_tokens for part in generated)
        output_tokens = sum(part.output_tokens for part in generated)
        trace.generated(prompt_tokens, output_tokens, min(firsts, default=0))


def trace_steps(
    trace: RequestTrace,
    times: RequestTimes,
    spent: Mapping[str, Sequence[int]],
    models: Mapping[str, Step],
    request_id: str,
) -> None:
    """Add a trace for each step of an ensemble that its request reached, in their order."""
    began = times.began_ns
    reached = (began, times.input_ended_ns, times.infer_ended_ns)
    for (phase, durations), came in zip(spent.items(), reached, strict=True):
        ended = began + sum(durations)
        step = models.get(phase)
        if step is not None and step.version and came:
            child = trace.child()
            child.model(step.name, step.version, request_id)
            child.stamp("REQUEST_START", began)
            child.stamp("QUEUE_START", began)
            _stamp_phases(child, durations, began, ended)
            child.stamp("REQUEST_END", ended)
        began = ended


def _stamp_phases(trace: RequestTrace, spent: Sequence[int], began: int, ended: int) -> None:
    queue, compute_input, _, compute_output = spent
    trace.stamp("COMPUTE_START", began + queue)
    trace.stamp("COMPUTE_INPUT_END", began + queue + compute_input)
    trace.stamp("COMPUTE_OUTPUT_START", ended - compute_output)
    trace.stamp("COMPUTE_END", ended)
