"""The gRPC calls that a secondary front end forwards to the primary one, as bytes.

A forwarded call is a stream of frames over a connection of its own: a head, then the messages of
the client and of the server, and a status at the end. Closing the connection cancels the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError

from slipstream.server.frontends.frames import FrameStream
from slipstream.server.frontends.upstream import GRPC, Upstream
from slipstream.server.grpc.errors import BYTES_PER_SIZE, check_access
from slipstream.server.grpc.infer import Inference
from slipstream.server.grpc.protocol import messages
from slipstream.server.grpc.service import MODEL_INFER, MODEL_STREAM_INFER, SERVER_LIVE
from slipstream.server.grpc.transport import (
    Call,
    ClientGone,
    Handler,
    Status,
    StreamCall,
    Streaming,
    Unary,
)
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import InferenceError, NeedsPrimary
from slipstream.server.text.threads import in_thread_if_long

HEAD = b"H"  # kinds of frames
MESSAGE = b"M"
END = b"E"  # the client sends no more messages
STATUS = b"S"
OK = grpc.StatusCode.OK.value[0]
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOST = "the server is restarting or shutting down"
# metadata of the connection between client and secondary front end
_NOT_FORWARDED = frozenset(("content-type", "te"))
_NOT_FORWARDED_PREFIXES = ("grpc-", ":")


@dataclass(frozen=True)
class CallHead:
    path: str
    text_metadata: list[tuple[str, str]]
    binary_metadata: list[tuple[str, bytes]]
    peer: str  # of the client

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        return [*self.text_metadata, *self.binary_metadata]


@dataclass(frozen=True)
class CallStatus:
    code: int
    details: str


class GrpcForwarder:
    """Forwards calls to the primary front end."""

    def __init__(self, upstream: Upstream, index: int) -> None:
        self._upstream = upstream
        self._index = index

    @asynccontextmanager
    async def open(self, path: str, call: Call) -> AsyncIterator[FrameStream]:
        """Begin a call at the primary front end. Leaving the block cancels it."""
        head = _write_head(path, call, self._index)
        try:
            stream = FrameStream(*await self._upstream.connect(GRPC))
        except OSError as error:
            raise Status(grpc.StatusCode.UNAVAILABLE, _LOST) from error
        try:
            stream.write(HEAD, msgspec.msgpack.encode(head))
            yield stream
        finally:
            stream.close()

    def unary(self, path: str) -> Unary:
        """Return a handler that forwards a call with one message."""

        async def answer(message: bytes, call: Call) -> bytes:
            return await self.forward(path, message, call)

        return Unary(answer)

    async def forward(self, path: str, message: bytes, call: Call) -> bytes:
        async with self.open(path, call) as stream:
            stream.write(MESSAGE, message)
            stream.write(END, b"")
            responses = [response async for response in read_messages(stream)]
            return responses[0]

    def streaming(self, path: str) -> Streaming:
        """Return a handler that forwards a call with any number of messages both ways."""

        async def run(call: StreamCall) -> None:
            async with self.open(path, call) as stream:
                sending = asyncio.ensure_future(_send_all(call, stream))
                try:
                    async for response in read_messages(stream):
                        await call.write(response)
                finally:
                    sending.cancel()

        return Streaming(run)


def _write_head(path: str, call: Call, index: int) -> CallHead:
    texts: list[tuple[str, str]] = []
    binary: list[tuple[str, bytes]] = []
    for key, value in call.metadata:
        lower = key.lower()
        if lower in _NOT_FORWARDED or lower.startswith(_NOT_FORWARDED_PREFIXES):
            continue
        if isinstance(value, bytes):
            binary.append((key, value))
        else:
            texts.append((key, value))
    return CallHead(path, texts, binary, f"{index}/{call.peer()}")


async def _send_all(call: StreamCall, stream: FrameStream) -> None:
    async for message in call:
        stream.write(MESSAGE, message)
        await stream.drain()
    stream.write(END, b"")


async def read_messages(stream: FrameStream) -> AsyncIterator[bytes]:
    """Return the messages of the server. Raise its status where that is an error."""
    while (frame := await stream.read()) is not None:
        if frame.kind == MESSAGE:
            yield frame.content
        elif frame.kind == STATUS:
            status = msgspec.msgpack.decode(frame.content, type=CallStatus)
            if status.code != OK:
                raise Status(_CODES[status.code], status.details)
            return
    raise Status(grpc.StatusCode.UNAVAILABLE, _LOST)


class SplitStream:
    """A stream of inference requests: those that this front end serves, without the others.

    The others go to the primary front end. The client gets the responses of both. After the first
    forwarded request of a stream the later ones are forwarded, too, so that they keep their order.
    """

    def __init__(
        self, call: StreamCall, inference: Inference, forwarder: GrpcForwarder, forward_all: bool
    ) -> None:
        self.metadata: Sequence[tuple[str, str | bytes]] = call.metadata
        self.peer = call.peer
        self._call = call
        self._inference = inference
        self._forwarder = forwarder
        self._forwards = forward_all
        self._turn = asyncio.Lock()  # gRPC takes one message at a time
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # None: no more
        self._forwarded = asyncio.Event()  # the primary front end has ended its part
        # the last request served here whose response the forwarded ones must follow
        self._ordered: asyncio.Task[None] | None = None

    def __aiter__(self) -> SplitStream:
        return self

    async def __anext__(self) -> bytes:
        """Return the next message that this front end serves."""
        async for data in self._call:
            if not self._forwards and await self._is_served_here(data):
                return data
            self._forwards = True
            await self._unless_ended(self._pass_on(data))
            break
        raise StopAsyncIteration

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this to its end, or until the primary front end has ended its part."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._forwarded.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            ended.cancel()

    async def _pass_on(self, data: bytes) -> None:
        """Forward a message and all that follow."""
        await self._outgoing.put(data)
        async for more in self._call:
            await self._outgoing.put(more)

    async def write(self, message: bytes) -> None:
        async with self._turn:
            await self._call.write(message)

    async def run(self) -> None:
        """Answer all requests of the stream."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve())
                tasks.create_task(self._forward())
        except* Status as group:
            raise group.exceptions[0] from None
        except* ClientGone:
            pass

    async def _serve(self) -> None:
        await self._inference.model_stream_infer(self, self._keep_order)
        await self._unless_ended(self._outgoing.put(None))

    def _keep_order(self, task: asyncio.Task[None]) -> None:
        self._ordered = task

    async def _forward(self) -> None:
        first = await self._outgoing.get()
        if first is None:
            return
        async with self._forwarder.open(MODEL_STREAM_INFER, self) as stream:
            sending = asyncio.ensure_future(self._send(first, stream))
            try:
                async for response in read_messages(stream):
                    if self._ordered is not None:
                        await asyncio.wait([self._ordered])
                    await self.write(response)
            finally:
                sending.cancel()
                self._forwarded.set()

    async def _send(self, message: bytes | None, stream: FrameStream) -> None:
        while message is not None:
            stream.write(MESSAGE, message)
            await stream.drain()
            message = await self._outgoing.get()
        stream.write(END, b"")

    async def _is_served_here(self, data: bytes) -> bool:
        try:
            message = await in_thread_if_long(
                len(data) // BYTES_PER_SIZE, messages.ModelInferRequest.FromString, data
            )
            admitted = await self._inference.admit(message, len(data), {}, ())
            admitted.call.request.peer = self.peer
            admitted.entry.model.check_served_here(admitted.call.request)
        except NeedsPrimary:
            return False
        except (InferenceError, DecodeError):
            return True  # it is refused here as there
        return True


def secondary_handlers(
    own: Mapping[str, Handler],
    inference: Inference,
    access: Access,
    forwarder: GrpcForwarder,
    forwards_all: Callable[[], bool],
) -> dict[str, Handler]:
    """Return the handlers of a secondary front end. `own`: those of a server without others.

    It serves inference and forwards everything else.
    """
    infer = own[MODEL_INFER]
    assert isinstance(infer, Unary)

    async def answer(message: bytes, call: Call) -> bytes:
        if not forwards_all():
            try:
                return await infer.answer(message, call)
            except NeedsPrimary:
                pass
        return await forwarder.forward(MODEL_INFER, message, call)

    async def run(call: StreamCall) -> None:
        check_access(call, access, "inference")
        await SplitStream(call, inference, forwarder, forwards_all()).run()

    handlers: dict[str, Handler] = {
        path: (forwarder.unary(path) if isinstance(handler, Unary) else forwarder.streaming(path))
        for path, handler in own.items()
    }
    return handlers | {
        MODEL_INFER: Unary(answer),
        MODEL_STREAM_INFER: Streaming(run),
        SERVER_LIVE: own[SERVER_LIVE],
    }
