"""The checks of Triton's core on the inputs of a request, the same for every protocol.

Raw bytes are decoded last: a request with a wrong input name, type or shape is refused before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sized
from math import prod
from typing import NamedTuple

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.kserve.errors import InferenceError, PlainTextError
from slipstream.server.kserve.inference import InferRequest
from slipstream.server.kserve.tensor_bytes import (
    DATATYPES,
    SIZES,
    Buffer,
    IncompleteString,
    unpack,
)
from slipstream.server.kserve.tensors import Array, Tensor

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)

MAX_MEMBERS = 4096  # inputs and parameters of a request

# Lengths, ids and counts that were unsigned in the repositories and clients of 2023.
_FORMERLY_UNSIGNED = frozenset(
    {
        "INPUT_1",
        "REQUEST_OUTPUT_LEN",
        "max_tokens",
        "request_output_len",
        "input_lengths",
        "end_id",
        "pad_id",
        "beam_width",
        "runtime_top_k",
        "top_k",
        "min_length",
        "random_seed",
        "lora_task_id",
    }
)


def check_member_count(members: Sized) -> None:
    """Refuse a request with more parameters than any model has, before they are read."""
    if len(members) > MAX_MEMBERS:
        raise InferenceError(
            f"a request has at most {MAX_MEMBERS} inputs and parameters, got {len(members)}"
        )


def request_error(request: InferRequest, text: str) -> InferenceError:
    """Return an error that names the request by its id."""
    return InferenceError(f"[request id: {request.id or '<id_unknown>'}] {text}")


def tensor_without_data(name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose bytes `check_request` decodes once it has checked the rest."""
    return Tensor(name, datatype, shape, [])


def decode(request: InferRequest, tensor: Tensor, raw: Buffer) -> Array | list[bytes]:
    """Return the values in `raw`, which must have the size that the tensor's shape needs."""
    if tensor.datatype == "BYTES":
        try:
            items = unpack("BYTES", raw)
        except IncompleteString as error:
            raise _incomplete(request, tensor, error) from error
        if len(items) != prod(tensor.shape):
            raise _wrong_strings(request, tensor, len(items))
        return items
    expected = prod(tensor.shape) * SIZES[tensor.datatype]
    if len(raw) != expected:
        raise _wrong_size(request, tensor, expected, len(raw))
    return unpack(tensor.datatype, raw)


def _place(request: InferRequest, tensor: Tensor) -> str:
    return f"'{tensor.name}' for model '{request.model_name}'"


def _wrong_size(request: InferRequest, tensor: Tensor, expected: int, given: int) -> InferenceError:
    return request_error(
        request,
        f"input byte size mismatch for input {_place(request, tensor)}. "
        f"Expected {expected}, got {given}",
    )


def _wrong_strings(request: InferRequest, tensor: Tensor, given: int) -> InferenceError:
    """Return the error for too few or too many strings. Triton counts up to the first too many."""
    count = prod(tensor.shape)
    place = f"for inference input {_place(request, tensor)}"
    if given > count:
        text = f"unexpected number of string elements {count + 1} {place}, expecting {count}"
    else:
        text = f"expected {count} string elements {place}, got {given}"
    return request_error(request, text)


def _incomplete(request: InferRequest, tensor: Tensor, error: IncompleteString) -> InferenceError:
    count = prod(tensor.shape)
    if error.complete > count or (error.complete < count and error.length is not None):
        return _wrong_strings(request, tensor, error.complete)
    if error.length is None:
        text = (
            f"incomplete string length indicator for inference input {_place(request, tensor)}, "
            f"expecting 4 bytes but only {error.available} bytes available. Please make sure the "
            "string length indicator is in one buffer."
        )
        return request_error(request, text)
    # Triton leaves this check to the backend, which does not know the id of the request
    return PlainTextError(
        f"incomplete string data for inference input '{tensor.name}', expecting string of length "
        f"{error.length} but only {error.available} bytes available"
    )


def check_request(
    request: InferRequest, config: ModelConfig, raw: dict[str, Buffer] | None = None
) -> None:
    """Check names, types and shapes, then decode `raw`.

    `raw`: the bytes of the inputs that `tensor_without_data` made, by name.
    """
    raw = raw or {}
    empty = _check_counts(request, config)
    # Triton iterates over a hash map, which has the last input first
    for tensor in reversed(request.inputs.values()):
        expected = config.inputs_by_name.get(tensor.name)
        if expected is None:
            raise InferenceError(
                f"unexpected inference input '{tensor.name}' for model '{config.name}'"
            )
        _check_tensor(request, tensor, expected, config)
    if empty is not None:
        _check_empty(request, empty, raw.get(empty.tensor.name, b""))
    _check_strings(request, raw)
    for name in reversed(raw):
        tensor = request.inputs[name]
        tensor.data = decode(request, tensor, raw[name])
    if request.outputs:
        check_outputs(request.outputs, config)
    if config.sequence_batching is not None:
        check_sequence(request, config)


def check_sequence(request: InferRequest, config: ModelConfig) -> None:
    if not request.sequence_id:
        text = "must specify a non-zero or non-empty correlation ID"
        raise InferenceError(f"inference request to model '{config.name}' {text}")


def check_inputs(request: InferRequest, config: ModelConfig) -> None:
    """Check the number of inputs, their batch sizes, and the number of strings."""
    empty = _check_counts(request, config)
    if empty is not None:
        _check_empty(request, empty, b"")
    _check_strings(request)


class _EmptyInput(NamedTuple):
    """An input without batch items. Triton expects as many as the others have, or one."""

    tensor: Tensor
    size: int


def _check_counts(request: InferRequest, config: ModelConfig) -> _EmptyInput | None:
    """Check the number of inputs and their batch sizes. Return an input without batch items."""
    if not len(config.required_inputs) <= len(request.inputs) <= len(config.inputs):
        raise _wrong_count(request, config)
    return _check_batch(request, config) if config.max_batch_size > 0 else None


def _check_strings(request: InferRequest, raw: Container[str] = frozenset()) -> None:
    """Check the number of strings of the BYTES inputs that are not in `raw`."""
    for tensor in request.inputs.values():
        if tensor.datatype != "BYTES" or tensor.name in raw:
            continue
        if len(tensor.data) != prod(tensor.shape):
            raise _wrong_strings(request, tensor, len(tensor.data))


def _wrong_count(request: InferRequest, config: ModelConfig) -> InferenceError:
    """Return the error for too few or too many inputs.

    Like Triton, the check counts inputs, so an optional one can hide that another is missing.
    """
    required = config.required_inputs
    given = len(request.inputs)
    total = len(config.inputs)
    expected = f"{total} inputs"
    if len(required) < total:
        expected = f"number of inputs between {len(required)} and {total}"
    got = ",".join(f"'{name}'" for name in reversed(request.inputs))
    names = ",".join(_missing(request, config))
    missing = f"[{names}]" if names else "]"  # the bracket is missing in Triton's text
    text = (
        f"expected {expected} but got {given} inputs for model '{config.name}'. "
        f"Got input(s) [{got}], but missing required input(s) {missing}. "
        "Please provide all required input(s)."
    )
    return request_error(request, text)


def _missing(request: InferRequest, config: ModelConfig) -> list[str]:
    """Return the required inputs that are missing, quoted.

    A model with an input `messages` needs only one of it and `text_input`.
    """
    either = {}
    if "messages" in config.inputs_by_name:
        either = {"text_input": "'text_input' or 'messages'"}
    given = {*request.inputs, *(either if "messages" in request.inputs else ())}
    return [either.get(name, f"'{name}'") for name in config.required_inputs if name not in given]


def _check_batch(request: InferRequest, config: ModelConfig) -> _EmptyInput | None:
    size = 0
    empty: Tensor | None = None
    # Triton iterates over a hash map, which has the last input first
    for tensor in reversed(request.inputs.values()):
        if not tensor.shape:
            raise request_error(
                request,
                f"input '{tensor.name}' has no shape but model requires batch dimension for "
                f"'{config.name}'",
            )
        if not size:
            size = tensor.shape[0]
            if not size:
                empty = empty or tensor
        elif tensor.shape[0] != size or size < 0:
            raise request_error(
                request,
                f"input '{tensor.name}' batch size does not match other inputs for '{config.name}'",
            )
    if size > config.max_batch_size:
        raise request_error(
            request,
            f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'",
        )
    return None if empty is None else _EmptyInput(empty, max(1, size))


def _check_empty(request: InferRequest, empty: _EmptyInput, raw: Buffer) -> None:
    tensor = empty.tensor
    shape = (empty.size, *tensor.shape[1:])
    if tensor.datatype == "BYTES":
        tensor.shape = shape
        raise _wrong_strings(request, tensor, 0)
    expected = prod(shape) * SIZES[tensor.datatype]
    if expected != len(raw):
        raise _wrong_size(request, tensor, expected, len(raw))


def check_outputs(names: Iterable[str], config: ModelConfig) -> None:
    for name in names:
        if name not in config.output_names:
            raise InferenceError(f"unexpected inference output '{name}' for model '{config.name}'")


def _check_tensor(
    request: InferRequest, tensor: Tensor, expected: TensorConfig, config: ModelConfig
) -> None:
    if tensor.datatype != expected.datatype and not _differs_in_sign(tensor, expected):
        given = tensor.datatype if tensor.datatype in DATATYPES else "<invalid>"
        kinds = f"data-type is '{given}', but model '{config.name}' expects '{expected.datatype}'"
        raise request_error(request, f"inference input '{tensor.name}' {kinds}")
    wanted = ((-1,) if config.max_batch_size > 0 else ()) + expected.dims
    if len(wanted) != len(tensor.shape) or any(map(_differ, wanted, tensor.shape)):
        if len(wanted) == len(tensor.shape) and min(tensor.shape) < 0:
            place = _place(request, tensor)
            text = f"All input dimensions should be specified for input {place}, got "
            raise request_error(request, text + _shape(tensor.shape))
        shapes = f"Expected {_shape(wanted)}, got {_shape(tensor.shape)}. "
        text = f"unexpected shape for input '{tensor.name}' for model '{config.name}'. {shapes}"
        raise request_error(request, text + (_BATCH_NOTE if config.max_batch_size > 0 else ""))


def _differ(wanted: int, given: int) -> bool:
    return given < 0 or wanted not in (-1, given)


def _differs_in_sign(tensor: Tensor, expected: TensorConfig) -> bool:
    """Return whether the types differ only in the sign that clients of 2023 did not have."""
    pair = {tensor.datatype, expected.datatype}
    return tensor.name in _FORMERLY_UNSIGNED and pair in ({"INT32", "UINT32"}, {"INT64", "UINT64"})


def _shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in dims) + "]"
