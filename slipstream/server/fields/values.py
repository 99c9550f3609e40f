"""Reading the fields of a Triton request and checking them against the table of request fields.

Fields go by the names of the generate endpoint; `repository/roles.py` translates the tensors of
each repository generation into them. An error uses the name that the client used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
# is rejected without being tokenized.
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
        """Return the first value of the tensor, None if it is empty."""
        return self.tensor.first


class RequestFields(Mapping[str, FieldValue]):
    """The fields of one request, within their bounds, by the names of the field table.

    The getters return a default for a field that is missing or has no value.
    """

    def __init__(self, fields: dict[str, FieldValue]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> FieldValue:
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def given(self, name: str) -> FieldValue | None:
        """Return the field if it has a value."""
        field = self._fields.get(name)
        return None if field is None or field.value is None else field

    def value(self, name: str, default: Any = None) -> Any:
        """Return the first value of a field."""
        field = self.given(name)
        return default if field is None else field.value

    def integer(self, name: str, default: int = 0) -> int:
        return int(self.value(name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.value(name, default))

    def text(self, name: str) -> str:
        """Return the first text of a field, empty if there is none."""
        return self._fields[name].tensor.text() if name in self._fields else ""

    def texts(self, name: str) -> list[str]:
        return self._fields[name].tensor.texts() if name in self._fields else []

    def numbers(self, name: str) -> list[Any]:
        """Return all numbers of a field."""
        return self._fields[name].tensor.values() if name in self._fields else []

    def require(self, name: str, label: str) -> FieldValue:
        """Return a field that must have a value. `label` is the name that the client knows.

        Triton checks that required inputs are sent, but not that they have values.
        """
        field = self.given(name)
        if field is None:
            raise InferenceError(f"{label} is required")
        return field


def check_batch(request: InferRequest, config: ModelConfig) -> None:
    """Refuse a request with several prompts: in-flight batching combines requests instead."""
    if config.max_batch_size > 0 and any(
        tensor.shape[0] != 1 for tensor in request.inputs.values()
    ):
        raise InferenceError("Inflight batching backend expects requests with batch size of 1.")


def read_request_fields(request: InferRequest, names: Mapping[str, str]) -> RequestFields:
    """Return the fields of a request after checking their bounds. `names`: input → field."""
    fields = {
        names.get(name, name): FieldValue(name, tensor) for name, tensor in request.inputs.items()
    }
    for name, value in request.parameters.items():
        field = ALIASES.get(name, name)
        if name in BY_PARAMETER and field not in fields:
            tensor = _parameter_tensor(name, BY_PARAMETER[name].datatype, value)
            fields[field] = FieldValue(name, tensor)
    for field, given in fields.items():
        _check(field, given)
    request_type = request.parameters.get("request_type", _WHOLE)
    if request_type != _WHOLE:
        raise InferenceError(
            f"request_type {request_type!r} is not supported by this server: "
            "it computes prompt and output itself",
            Code.UNSUPPORTED,
        )
    return RequestFields(fields)


def _parameter_tensor(name: str, datatype: str, value: Any) -> Tensor:
    """Return the tensor of a value that a client sent as a request parameter."""
    if type(value) not in _PYTHON_TYPES[datatype]:
        raise InferenceError(f"{name} must be of type {datatype}, got {value!r}")
    # Wide types keep the number as it was sent, so that an error can quote it.
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
            f"{given.name} is not supported by this server: {field.refused}", Code.UNSUPPORTED
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
        return  # fast path for tensors as long as the vocabulary
    for value in given.tensor.values():
        problem = bound.problem(value)
        if problem:
            raise InferenceError(f"{given.name} {problem}, got {value}")


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


def check_tokens(prompt: list[int], longest: int) -> None:
    if len(prompt) > longest:
        raise InferenceError(
            f"Prompt length ({len(prompt)}) exceeds maximum input length ({longest})."
        )


def check_prompt_length(given: FieldValue, max_input_tokens: int) -> None:
    """Reject, without tokenizing it, a text that has too many tokens with any tokenizer."""
    size = len(given.value)
    if size > max_input_tokens * LONGEST_TOKEN_CHARACTERS:
        text = f"Prompt length (over {max_input_tokens}, {given.name} has {size} bytes)"
        raise InferenceError(f"{text} exceeds maximum input length ({max_input_tokens}).")
