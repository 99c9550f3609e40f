"""The checks of Triton's core on the inputs of a request, the same for every protocol.

Raw bytes are decoded last: a request with a wrong input name, type or shape is refused before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from math import prod

from slipstream.repository.config import ModelConfig, TensorConfig
from slipstream.server.kserve.errors import InferenceError
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
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)

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


def request_error(request: InferRequest, text: str) -> InferenceError:
    """Return an error that names the request by its id."""
    return InferenceError(f"[request id: {request.id or '<id_unknown>'}] {text}")


def tensor_without_data(name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose bytes `check_request` decodes once it has checked the rest."""
    return Tensor(name, datatype, shape, [])


def decode(request: InferRequest, tensor: Tensor, raw: Buffer) -> Array | list[bytes]:
    """Return the values in `raw`, which must have the size that the tensor's shape needs."""
    place = f"'{tensor.name}' for model '{request.model_name}'"
    count = prod(tensor.shape)
    if tensor.datatype == "BYTES":
        try:
            items = unpack("BYTES", raw)
        except IncompleteString as error:
            text = (
                f"incomplete string data for inference input {place}, "
                f"expecting string of length {error.length}"
            )
            raise request_error(request, text) from error
        if len(items) != count:
            raise request_error(
                request,
                f"expected {count} string elements for inference input {place}, got {len(items)}",
            )
        return items
    expected = count * SIZES[tensor.datatype]
    if len(raw) != expected:
        raise request_error(
            request,
            f"input byte size mismatch for input {place}. Expected {expected}, got {len(raw)}",
        )
    return unpack(tensor.datatype, raw)


def check_request(
    request: InferRequest, config: ModelConfig, raw: Mapping[str, Buffer] | None = None
) -> None:
    """Check names, types and shapes, then decode `raw`.

    `raw`: the bytes of the inputs that `tensor_without_data` made, by name.
    """
    raw = raw or {}
    check_inputs(request, config, raw)
    for tensor in request.inputs.values():
        expected = config.inputs_by_name.get(tensor.name)
        if expected is None:
            raise InferenceError(
                f"unexpected inference input '{tensor.name}' for model '{config.name}'"
            )
        _check_tensor(request, tensor, expected, config)
    for name, data in raw.items():
        tensor = request.inputs[name]
        tensor.data = decode(request, tensor, data)
    if request.outputs:
        check_outputs(request.outputs, config)
    if config.sequence_batching is not None:
        check_sequence(request, config)


def check_sequence(request: InferRequest, config: ModelConfig) -> None:
    if not request.sequence_id:
        text = "must specify a non-zero or non-empty correlation ID"
        raise InferenceError(f"inference request to model '{config.name}' {text}")


def check_inputs(
    request: InferRequest, config: ModelConfig, raw: Container[str] = frozenset()
) -> None:
    """Check the number of inputs, their batch sizes, and the number of strings if not in `raw`."""
    if not len(config.required_inputs) <= len(request.inputs) <= len(config.inputs):
        raise _wrong_count(request, config)
    if config.max_batch_size > 0:
        _check_batch(request, config)
    for tensor in request.inputs.values():
        if tensor.datatype != "BYTES" or tensor.name in raw:
            continue
        expected = prod(tensor.shape)
        if len(tensor.data) != expected:
            text = (
                f"unexpected number of string elements {len(tensor.data)} for inference input "
                f"'{tensor.name}' for model '{config.name}', expecting {expected}"
            )
            raise request_error(request, text)


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


def _check_batch(request: InferRequest, config: ModelConfig) -> None:
    size: int | None = None
    # Triton iterates over a hash map, which has the last input first
    for tensor in reversed(request.inputs.values()):
        if not tensor.shape:
            raise request_error(
                request,
                f"input '{tensor.name}' has no shape but model requires batch dimension for "
                f"'{config.name}'",
            )
        if size is None:
            size = tensor.shape[0]
        elif tensor.shape[0] != size:
            raise request_error(
                request,
                f"input '{tensor.name}' batch size does not match other inputs for '{config.name}'",
            )
    if size is not None and size > config.max_batch_size:
        raise request_error(
            request,
            f"inference request batch-size must be <= {config.max_batch_size} for '{config.name}'",
        )


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
        shapes = f"Expected {_shape(wanted)}, got {_shape(tensor.shape)}."
        text = f"unexpected shape for input '{tensor.name}' for model '{config.name}'. {shapes}"
        raise request_error(request, text + (_BATCH_NOTE if config.max_batch_size > 0 else ""))


def _differ(wanted: int, given: int) -> bool:
    return wanted not in (-1, given)


def _differs_in_sign(tensor: Tensor, expected: TensorConfig) -> bool:
    """Return whether the types differ only in the sign that clients of 2023 did not have."""
    pair = {tensor.datatype, expected.datatype}
    return tensor.name in _FORMERLY_UNSIGNED and pair in ({"INT32", "UINT32"}, {"INT64", "UINT64"})


def _shape(dims: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in dims) + "]"
