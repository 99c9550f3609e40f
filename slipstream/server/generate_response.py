"""One answer of a model as the generate endpoints write it: one flat object, its keys sorted."""

from __future__ import annotations

from functools import lru_cache

from slipstream.server.inference import InferRequest, InferResponse
from slipstream.server.json_text import write_error, write_scalar, write_string
from slipstream.server.tensors import Tensor

EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


def write_response(request: InferRequest, response: InferResponse) -> bytes:
    if response.error is not None:
        return write_error(response.error.message)
    names = [tensor.name for tensor in response.outputs]
    values = [write_tensor(tensor) for tensor in response.outputs]
    for name, value in response.parameters.items():
        names.append(name)
        values.append(write_scalar(value))
    names += ("model_name", "model_version")
    values += (write_scalar(request.model_name), write_scalar(request.model_version))
    if request.id:
        names.append("id")
        values.append(write_scalar(request.id))
    return b"{" + b",".join([key + values[position] for position, key in _layout(tuple(names))]) + b"}"


@lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
    """Which value comes when, and its key: Triton keeps them in a std::map, which sorts by byte.

    The answers of a stream all have the same names, so this is worked out once for all of them.
    """
    positions = {name.encode("utf-8", "surrogateescape"): position for position, name in enumerate(names)}
    return tuple((position, write_string(name) + b":") for name, position in sorted(positions.items()))


def write_tensor(tensor: Tensor) -> bytes:
    """One element is a scalar, more are a flat array."""
    if len(tensor.data) == 1:
        return write_scalar(tensor.data[0])
    return b"[" + b",".join([write_scalar(item) for item in tensor.data]) + b"]"
