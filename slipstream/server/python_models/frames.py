"""What goes over the two sockets between the server and the process of a Python model.

Orders come over one, which the thread that runs the model reads itself: to be handed each by
another thread costs more than most orders do. What a model may have to hear while it runs comes
over the other.

A frame is four bytes of length and the msgpack form of one of the structures below. Both ends
decode into these types and refuse anything else; tensors travel as raw bytes and nothing here can
name code to run.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME_BYTES = (1 << 31) - 1
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """Bytes that are no frame of ours."""


class TensorFrame(msgspec.Struct, frozen=True, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]  # little-endian values in row-major order; BYTES: one item each


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    message: str
    code: str  # a name of `errors.Code`


class ResponseFrame(msgspec.Struct, frozen=True, array_like=True):
    outputs: list[TensorFrame]
    error: ErrorFrame | None = None
    parameters: dict[str, str | int | float | bool] = {}


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    number: int  # names the request on this socket
    id: str
    correlation_id: int | str
    flags: int
    timeout: int
    parameters: str  # JSON
    requested_outputs: tuple[str, ...]
    inputs: list[TensorFrame]
    trace: int = 0  # the number of the request whose trace this one belongs to
    trace_context: str = ""  # JSON of W3C's headers


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first frame: which model to be."""

    file: str
    model_folder: str
    instance: str
    decoupled: bool
    arguments: dict[str, str]  # of `initialize`
    complete_config: bool


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    requests: list[RequestFrame]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    number: int


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Another mark among the answers to the request has been reached, the oldest first."""

    number: int


class CallAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """One response to a call of another model, or only its end, or a mark as in `Response`."""

    call: int
    response: ResponseFrame | None
    final: bool


class ControlAnswer(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    call: int
    value: float
    error: ErrorFrame | None


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish what runs, then `finalize` and leave."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    config: str  # JSON, as `auto_complete_config` left it; empty where the model has no such method


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    reason: str


class Response(msgspec.Struct, frozen=True, array_like=True, tag="response"):
    """One that is neither a response nor the end is a mark: whoever sent it wants to know when it
    is reached.
    """

    number: int
    response: ResponseFrame | None
    final: bool


class Executed(msgspec.Struct, frozen=True, array_like=True, tag="executed"):
    """`execute` has returned; the instance can take more."""

    responses: list[Response]  # what it returned


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Ask another model of the server."""

    request: RequestFrame
    model_name: str
    model_version: int
    decoupled: bool


class CallCancel(msgspec.Struct, frozen=True, array_like=True, tag="call-cancel"):
    call: int


class CallRead(msgspec.Struct, frozen=True, array_like=True, tag="call-read"):
    """Another mark among the answers to the call has been reached, the oldest first."""

    call: int


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """is_model_ready, load_model, unload_model, or the value of a metric."""

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
News = Cancel | Read | CallAnswer | ControlAnswer
ToWorker = Order | News
FromWorker = (
    Started
    | StartFailed
    | Response
    | Executed
    | Call
    | CallCancel
    | CallRead
    | Control
    | Log
    | MetricFamilyFrame
    | MetricFrame
)
_ENCODER = msgspec.msgpack.Encoder()
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
NEWS: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is too large for a Python model's socket")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """The messages that are complete now. Most often they come whole, and are read where they
        are.
        """
        if self._buffer:
            self._buffer += data
        view = memoryview(self._buffer or data)
        messages, position = [], 0
        try:
            while len(view) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, position)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame claims {length} bytes")
                end = position + _LENGTH.size + length
                if end > len(view):
                    break
                messages.append(self._decoder.decode(view[position + _LENGTH.size : end]))
                position = end
        except msgspec.MsgspecError as error:
            raise FrameError(f"a damaged frame: {error}") from error
        if self._buffer:
            view.release()  # as long as it is looked at, it cannot shrink
            del self._buffer[:position]
        elif position < len(view):
            self._buffer += view[position:]
        return messages
