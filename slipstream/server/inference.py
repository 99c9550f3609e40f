"""What passes between a protocol and a model: a request of tensors, a stream of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.repository.config import ModelConfig
from slipstream.server.errors import InferenceError
from slipstream.server.tensors import Tensor

Parameter = str | int | float | bool


@dataclass(slots=True)
class InferRequest:
    model_name: str
    model_version: str
    inputs: dict[str, Tensor]
    id: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class InferResponse:
    """One answer: tensors, or an error. An error is not the end, more may follow."""

    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: InferenceError | None = None


class ServedModel(Protocol):
    """Something that answers. Closing the generator early gives the request up, at once."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def decoupled(self) -> bool:
        """May answer any number of times, not exactly once."""
        ...

    @property
    def ready(self) -> bool: ...

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]: ...
