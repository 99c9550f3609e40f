"""The gRPC calls that the primary front end receives from secondary ones."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence

import grpc
import msgspec

from slipstream.server.frontends.frames import FrameStream
from slipstream.server.frontends.grpc_forwarding import (
    HEAD,
    MESSAGE,
    OK,
    STATUS,
    CallHead,
    CallStatus,
)
from slipstream.server.grpc.transport import INTERNAL, ClientGone, Handler, Status, Unary

logger = logging.getLogger(__name__)

_MAX_UNREAD = 8  # messages of a client that wait for their handler
_CLOSE_SECONDS = 5.0  # longest wait for a secondary front end to read the status of a call


class ForwardedCalls:
    """Runs the handlers of forwarded calls."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, connection: socket.socket) -> None:
        """Serve the call of this connection."""
        task = asyncio.ensure_future(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, seconds: float) -> None:
        """Wait for the calls that run, then cancel those that still do."""
        if self._tasks:
            _, running = await asyncio.wait(self._tasks, timeout=seconds)
            for task in running:
                task.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        stream = FrameStream(*await asyncio.open_unix_connection(sock=connection))
        try:
            head = await stream.read()
            if head is None or head.kind != HEAD:
                return
            call = ForwardedCall(msgspec.msgpack.decode(head.content, type=CallHead), stream)
            answering = asyncio.ensure_future(self._conclude(call))
            reading = asyncio.ensure_future(call.read_frames())
            try:
                # reading ends when the client leaves
                await asyncio.wait([answering, reading], return_when=asyncio.FIRST_COMPLETED)
            finally:
                answering.cancel()
                reading.cancel()
            await asyncio.wait([answering, reading])
            await stream.drain()
            await stream.read_to_end(_CLOSE_SECONDS)
        except OSError:
            return  # the secondary front end has ended
        finally:
            stream.close()

    async def _conclude(self, call: ForwardedCall) -> None:
        status = CallStatus(OK, "")
        try:
            await self._run(call)
        except Status as error:
            status = CallStatus(error.code.value[0], error.details)
        except ClientGone:
            return
        except Exception:
            logger.exception("gRPC call failed:")
            status = CallStatus(grpc.StatusCode.INTERNAL.value[0], INTERNAL)
        call.end(status)

    async def _run(self, call: ForwardedCall) -> None:
        handler = self._handlers.get(call.path)
        if handler is None:
            raise Status(grpc.StatusCode.UNIMPLEMENTED, "")
        if isinstance(handler, Unary):
            await call.write(await handler.answer(await anext(call), call))
        else:
            await handler.run(call)


class ForwardedCall:
    """A call as handlers see it: a `StreamCall`."""

    def __init__(self, head: CallHead, stream: FrameStream) -> None:
        self.path = head.path
        self.metadata: Sequence[tuple[str, str | bytes]] = head.metadata
        self._peer = head.peer
        self._stream = stream
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD)

    def peer(self) -> str:
        return self._peer

    def __aiter__(self) -> ForwardedCall:
        return self

    async def __anext__(self) -> bytes:
        message = await self._messages.get()
        if message is None:
            raise StopAsyncIteration
        return message

    async def write(self, message: bytes) -> None:
        self._stream.write(MESSAGE, message)
        try:
            await self._stream.drain()
        except OSError as error:
            raise ClientGone from error

    def end(self, status: CallStatus) -> None:
        self._stream.write(STATUS, msgspec.msgpack.encode(status))

    async def read_frames(self) -> None:
        """Read the client's messages until the connection is closed."""
        while (frame := await self._stream.read()) is not None:
            await self._messages.put(frame.content if frame.kind == MESSAGE else None)
