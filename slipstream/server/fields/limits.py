"""Reading the fields of a Triton request and checking them against the table of request fields.

Fields go by the names of the generate endpoint; `repository/roles.py` translates the tensors of
each repository generation into them. An error uses the name that the client used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.repository.config import ModelConfig
from slipstream.request_fields.field import Range, Words
from slipstream.request_fields.table import ALIASES, BY_PARAMETER, FIELDS
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensors import Tensor

# Most characters that one token stands for. A prompt with more than this per token of the context
# is refused without being tokenized.
LONGEST_TOKEN_CHARACTERS = 256

# The only supported value of the parameter request_type. The others are for disaggregated serving.
_WHOLE = "context_and_generation"
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "BOOL": (bool,),
    "INT32": (int,),
    "UINT64": (int,),
    "FP32": (int, float),
    "BYTES": (str,),
}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """A field of a request: the name that the client used and its tensor."""

    name: str
    tensor: Tensor

    @property
    def value(self) -> Any:
        return self.tensor.first


def check_batch(request: InferRequest, config: ModelConfig) -> None:
    """A request is one prompt; in-flight batching is what puts requests together."""
    if config.max_batch_size > 0 and any(
        tensor.shape[0] != 1 for tensor in request.inputs.values()
    ):
        raise InferenceError("Inflight batching backend expects requests with batch size of 1.")


def given_fields(request: InferRequest, names: Mapping[str, str]) -> dict[str, FieldValue]:
    """The request's fields, each within its bounds. `names`: the wire's name → the field."""
    fields = {
        names.get(name, name): FieldValue(name, tensor) for name, tensor in request.inputs.items()
    }
    for name, value in request.parameters.items():
        field = ALIASES.get(name, name)
        if name in BY_PARAMETER and field not in fields:
            datatype = BY_PARAMETER[name].datatype
            fields[field] = FieldValue(name, _tensor_of(name, datatype, value))
    for field, given in fields.items():
        _check(field, given)
    if request.parameters.get("request_type", _WHOLE) != _WHOLE:
        asked = f"request_type {request.parameters['request_type']!r}"
        raise InferenceError(
            f"{asked} is not taken by this server, which computes prompt and answer",
            Code.UNSUPPORTED,
        )
    return fields


def _tensor_of(name: str, datatype: str, value: Any) -> Tensor:
    if type(value) not in _PYTHON_TYPES[datatype]:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}")
    # wide types, so that an error quotes the number as it was sent
    wide = {"INT32": "INT64", "FP32": "FP64"}.get(datatype, datatype)
    item = value.encode() if isinstance(value, str) else value
    try:
        return Tensor.from_values(name, wide, (1, 1), [item])
    except OverflowError:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}") from None


def _check(name: str, given: FieldValue) -> None:
    field = FIELDS.get(name)
    if field is None:
        raise InferenceError(f"{given.name} is not supported by this server", Code.UNSUPPORTED)
    if isinstance(field.bound, Range):
        _check_numbers(field.bound, given)
    elif isinstance(field.bound, Words):
        _check_words(field.bound, given)
    elif field.refused and _asks_for_something(given):
        raise InferenceError(
            f"{given.name} is not taken by this server: {field.refused}", Code.UNSUPPORTED
        )


def _asks_for_something(given: FieldValue) -> bool:
    return given.value is not None and given.value is not False and given.value != b""


def _check_numbers(bound: Range, given: FieldValue) -> None:
    data = given.tensor.data
    if (
        len(data) > 16
        and isinstance(data, np.ndarray)
        and np.isfinite(data).all()
        and not bound.problem(data.min().item())
        and not bound.problem(data.max().item())
    ):
        return  # a number for each token of a vocabulary is looked at as a whole
    for value in given.tensor.values():
        rule = bound.problem(value)
        if rule:
            raise InferenceError(f"{given.name} {rule}, got {value}")


def _check_words(bound: Words, given: FieldValue) -> None:
    words = given.tensor.strings()
    if len(words) > bound.count:
        raise InferenceError(
            f"{given.name} must hold at most {bound.count} words, got {len(words)}"
        )
    longest = max((len(word) for word in words), default=0)
    if longest > bound.bytes:
        raise InferenceError(
            f"a word of {given.name} must have at most {bound.bytes} bytes, got {longest}"
        )


def require(fields: Mapping[str, FieldValue], field: str, name: str) -> FieldValue:
    """Triton counts inputs only, so that a required one may still be missing."""
    given = fields.get(field)
    if given is None or given.value is None:
        raise InferenceError(f"{name} is required")
    return given


def check_tokens(prompt: list[int], longest: int) -> None:
    if len(prompt) > longest:
        raise InferenceError(
            f"Prompt length ({len(prompt)}) exceeds maximum input length ({longest})."
        )


def check_prompt_length(given: FieldValue, max_input_tokens: int) -> None:
    """Refuse, without reading it, a text that no tokenizer could make short enough."""
    size = len(given.value)
    if size > max_input_tokens * LONGEST_TOKEN_CHARACTERS:
        text = f"Prompt length (over {max_input_tokens}, {given.name} has {size} bytes)"
        raise InferenceError(f"{text} exceeds maximum input length ({max_input_tokens}).")
