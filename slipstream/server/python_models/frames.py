"""The messages on the two sockets between the server and the process of a Python model.

Orders come over the first socket. The thread that runs the model reads it itself: passing orders
from another thread would cost more than most of them take. Events, which a model may have to
receive while it runs, come over the second.

A frame is two lengths (of the whole frame and of its head), the head, which is the msgpack form of
one of the structures below, and the large tensors that the head mentions, in its order. Large
tensors are sent from where they are and received where they stay, without a copy in between. Both
ends decode into these types and refuse anything else; nothing here can name code to run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAX_FRAME_BYTES = (1 << 31) - 1
# Tensors from this size follow the head. The reader's buffer for small frames has the same size:
# a frame with a large tensor never fits into it and always has a buffer of its own.
LARGE_BYTES = 1 << 18
_LENGTHS = struct.Struct("<II")
_ALIGNMENT = 64  # of a large tensor in its frame, as NumPy and others expect of memory

Buffer = bytes | bytearray | memoryview


class FrameError(Exception):
    """Bytes that are not a valid frame."""


class LargeTensor(int):
    """The bytes of a tensor that follow the head of its frame. The head holds their number."""

    view: memoryview

    @classmethod
    def from_view(cls, view: memoryview) -> LargeTensor:
        large = cls(len(view))
        large.view = view
        return large


class TensorFrame(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    # for BYTES the items; else little-endian values in row-major order, as bytes or a LargeTensor
    data: bytes | list[bytes] | int

    def numbers(self) -> bytes | memoryview:
        """Return the bytes of the values. Raises FrameError where the frame has none."""
        if isinstance(self.data, LargeTensor):
            return self.data.view
        if isinstance(self.data, bytes):
            return self.data
        raise FrameError(f"tensor '{self.name}' has no numbers")


def numbers_to_data(array: npt.NDArray[Any]) -> bytes | LargeTensor:
    """Return what a TensorFrame holds of an array: a copy, or where it is large a view."""
    if array.nbytes < LARGE_BYTES:
        return array.tobytes()
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return LargeTensor.from_view(view)


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    message: str
    code: str  # name of a member of `errors.Code`


class ResponseFrame(msgspec.Struct, frozen=True, array_like=True):
    outputs: list[TensorFrame]
    error: ErrorFrame | None = None
    parameters: dict[str, str | int | float | bool] = {}


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    number: int  # identifies the request on this socket
    id: str
    correlation_id: int | str
    flags: int
    timeout: int
    parameters: str  # JSON
    requested_outputs: tuple[str, ...]
    inputs: list[TensorFrame]
    trace: int = 0  # number of the request whose trace this one belongs to
    trace_context: str = ""  # W3C trace headers as JSON


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first order: which model to load."""

    file: str
    model_folder: str
    instance: str
    decoupled: bool
    arguments: dict[str, str]  # arguments of `initialize`
    complete_config: bool


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    requests: list[RequestFrame]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    number: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """The reader has reached the oldest marker among the responses to a request."""

    number: int


class CallAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """One response to a call of another model, or only its end, or a marker as in `Response`."""

    call: int
    response: ResponseFrame | None
    final: bool


class ControlAnswer(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    call: int
    value: float
    error: ErrorFrame | None


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish what runs, then call `finalize` and exit."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    config: str  # JSON that `auto_complete_config` returned; empty if the model has no such method


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    reason: str


class Response(msgspec.Struct, frozen=True, array_like=True, tag="response"):
    """One response, or only the end, or else a marker (neither), which the reader acknowledges."""

    number: int
    response: ResponseFrame | None
    final: bool


class Executed(msgspec.Struct, frozen=True, array_like=True, tag="executed"):
    """`execute` has returned; the instance can take more requests."""

    responses: list[Response]  # the return value


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A request to another model of the server."""

    request: RequestFrame
    model_name: str
    model_version: int
    decoupled: bool


class CallCancel(msgspec.Struct, frozen=True, array_like=True, tag="call-cancel"):
    call: int


class CallAck(msgspec.Struct, frozen=True, array_like=True, tag="call-ack"):
    """The model has reached the oldest marker among the responses to its call."""

    call: int


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """A question to the server: is_model_ready, load_model, unload_model, or a metric's value."""

    call: int
    action: str
    name: str
    version: str = ""
    config: str = ""
    files: dict[str, bytes] = {}
    labels: dict[str, str] = {}
    unload_dependents: bool = False


class Log(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    level: str  # I, W, E or V
    message: str
    place: str
    request_id: str = ""


class MetricFamilyFrame(msgspec.Struct, frozen=True, array_like=True, tag="family"):
    name: str
    description: str
    kind: str  # counter, gauge or histogram


class MetricFrame(msgspec.Struct, frozen=True, array_like=True, tag="metric"):
    family: str
    labels: dict[str, str]
    action: str  # create, increment, set or observe
    value: float = 0.0
    buckets: tuple[float, ...] = ()


Order = Start | Execute | Stop
Event = Cancel | Ack | CallAnswer | ControlAnswer
ToWorker = Order | Event
FromWorker = (
    Started
    | StartFailed
    | Response
    | Executed
    | Call
    | CallCancel
    | CallAck
    | Control
    | Log
    | MetricFamilyFrame
    | MetricFrame
)
_ENCODER = msgspec.msgpack.Encoder()
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> list[Buffer]:
    """Return the pieces of a message's frame: one, and more where it has large tensors."""
    large: list[memoryview] = []
    head = bytearray(_LENGTHS.size)
    try:
        try:
            _ENCODER.encode_into(message, head, _LENGTHS.size)
        except TypeError:  # a LargeTensor, which is rare
            _encoder(large).encode_into(message, head, _LENGTHS.size)
    except (UnicodeEncodeError, OverflowError) as error:
        raise FrameError(f"a message cannot be sent to a Python model: {error}") from error
    pieces: list[Buffer] = [head]
    size = len(head)
    for view in large:
        padding = bytes(-size % _ALIGNMENT)
        pieces += (padding, view)
        size += len(padding) + len(view)
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {size} bytes is too large for a Python model's socket")
    _LENGTHS.pack_into(head, 0, size, len(head) - _LENGTHS.size)
    return pieces


def _encoder(large: list[memoryview]) -> msgspec.msgpack.Encoder:
    """Return an encoder that appends the bytes of large tensors to a list."""

    def collect(item: Any) -> int:
        if not isinstance(item, LargeTensor):
            raise TypeError(f"a frame cannot hold {type(item).__name__}")
        large.append(item.view)
        return int(item)

    return msgspec.msgpack.Encoder(enc_hook=collect)


def size_of(pieces: list[Buffer]) -> int:
    return sum(map(len, pieces))


class FrameReader:
    """Collects received bytes, which the caller writes to `room()`, into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._small = memoryview(bytearray(LARGE_BYTES))  # reused for all frames that fit
        self._buffer = self._small
        self._filled = 0

    def room(self) -> memoryview:
        """Return where to write the next bytes that are received."""
        return self._buffer[self._filled :]

    def received(self, count: int) -> list[Any]:
        """Return the messages that are complete now that `count` bytes were written to `room()`."""
        self._filled += count
        messages: list[Any] = []
        position = 0
        while self._filled - position >= _LENGTHS.size:
            size, head_bytes = _LENGTHS.unpack_from(self._buffer, position)
            if not _LENGTHS.size + head_bytes <= size <= MAX_FRAME_BYTES:
                raise FrameError(f"a frame claims {size} bytes with a head of {head_bytes}")
            if position + size > self._filled:
                self._make_room(position, size)
                return messages
            messages.append(self._decode(position, size, head_bytes))
            position += size
        self._make_room(position, _LENGTHS.size)
        return messages

    def _make_room(self, position: int, size: int) -> None:
        """Keep the bytes from `position` on, in a buffer that takes a frame of this size."""
        if not position and size <= len(self._buffer):
            return
        rest = self._buffer[position : self._filled]
        self._buffer = self._small if size <= LARGE_BYTES else np.empty(size, np.uint8).data
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)

    def _decode(self, position: int, size: int, head_bytes: int) -> Any:
        head = position + _LENGTHS.size
        try:
            message = self._decoder.decode(self._buffer[head : head + head_bytes])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError(f"a damaged frame: {error}") from error
        if _LENGTHS.size + head_bytes < size:
            frame = self._buffer[position : position + size]
            _attach_large(message, frame, _LENGTHS.size + head_bytes)
        return message


def _attach_large(message: ToWorker | FromWorker, frame: memoryview, position: int) -> None:
    """Put views of the large tensors, which follow the head, where the head has their sizes."""
    for tensor in _tensors(message):
        if type(tensor.data) is int:
            position += -position % _ALIGNMENT
            end = position + tensor.data
            if tensor.data < LARGE_BYTES or end > len(frame):
                raise FrameError(f"a damaged frame: tensor '{tensor.name}' does not fit it")
            tensor.data = LargeTensor.from_view(frame[position:end])
            position = end


def _tensors(message: ToWorker | FromWorker) -> Iterator[TensorFrame]:
    """Yield the tensors of a message in the order in which they are encoded."""
    if isinstance(message, Execute):
        for request in message.requests:
            yield from request.inputs
    elif isinstance(message, Call):
        yield from message.request.inputs
    elif isinstance(message, Executed):
        for response in message.responses:
            yield from _tensors(response)
    elif isinstance(message, (Response, CallAnswer)) and message.response is not None:
        yield from message.response.outputs
