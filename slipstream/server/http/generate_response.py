"""One answer of a model as the generate endpoints write it: one flat object, its keys sorted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from slipstream.server.kserve.inference import InferRequest, InferResponse, Parameter
from slipstream.server.kserve.json_writer import (
    write_error,
    write_scalar,
    write_string,
    write_values,
)
from slipstream.server.kserve.tensors import Tensor

EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


def values_of(response: InferResponse) -> int:
    """How many there are to write."""
    return sum([len(tensor.data) for tensor in response.outputs])


def write_response(request: InferRequest, response: InferResponse) -> bytes:
    if response.error is not None:
        return write_error(response.error.message)
    fixed = _fixed_members(request, response.parameters)
    names = [tensor.name for tensor in response.outputs] + [name for name, _ in fixed]
    values = [write_tensor(tensor) for tensor in response.outputs] + [value for _, value in fixed]
    return (
        b"{" + b",".join([key + values[position] for position, key in _layout(tuple(names))]) + b"}"
    )


class EventWriter:
    """The events of one stream. All but the values of the outputs is the same in each, and is put
    together once.
    """

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._names: list[str] = []
        self._parameters: Mapping[str, Parameter] | None = None
        self._pieces: list[bytes] = []  # the constant parts, and in between room for the values
        self._slots: list[tuple[int, int]] = []  # which piece is the value of which output

    def write(self, response: InferResponse) -> bytes:
        if response.error is not None:
            return b"data: " + write_error(response.error.message) + b"\n\n"
        names = [tensor.name for tensor in response.outputs]
        parameters = response.parameters
        if names != self._names or (
            parameters is not self._parameters and parameters != self._parameters
        ):
            self._lay_out(names, parameters)
        pieces = self._pieces
        for piece, output in self._slots:
            pieces[piece] = write_tensor(response.outputs[output])
        return b"".join(pieces)

    def _lay_out(self, names: list[str], parameters: Mapping[str, Parameter]) -> None:
        fixed = _fixed_members(self._request, parameters)
        self._names, self._parameters = names, parameters
        self._pieces, self._slots, text = [], [], b"data: {"
        layout = _layout((*names, *(name for name, _ in fixed)))
        for position, key in layout:
            text += key
            if position < len(names):
                self._slots.append((len(self._pieces) + 1, position))
                self._pieces += (text, b"")
                text = b""
            else:
                text += fixed[position - len(names)][1]
            text += b"," if key is not layout[-1][1] else b"}\n\n"
        self._pieces.append(text)


def _fixed_members(
    request: InferRequest, parameters: Mapping[str, Parameter]
) -> list[tuple[str, bytes]]:
    """What an answer holds besides its outputs."""
    members: list[tuple[str, Parameter]] = [*parameters.items()]
    members += [("model_name", request.model_name), ("model_version", request.model_version)]
    if request.id:
        members.append(("id", request.id))
    return [(name, write_scalar(value)) for name, value in members]


@lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
    """Which value comes when, and its key: Triton keeps them in a std::map, which sorts by byte.

    The answers of a stream all have the same names, so this is worked out once for all of them.
    """
    positions = {
        name.encode("utf-8", "surrogateescape"): position for position, name in enumerate(names)
    }
    return tuple(
        (position, write_string(name) + b":") for name, position in sorted(positions.items())
    )


def write_tensor(tensor: Tensor) -> bytes:
    """One element is a scalar, more are a flat array."""
    if len(tensor.data) == 1:
        return write_scalar(tensor.first)
    return b"[" + write_values(tensor.data) + b"]"
