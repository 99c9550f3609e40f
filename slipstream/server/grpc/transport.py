"""A gRPC server for handlers on the event loop: bytes in, bytes out.

Connections, TLS, flow control, keepalive, compression, deadlines and limits are those of gRPC's C
library.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc._cython import cygrpc

from slipstream.server.grpc.queue import CompletionQueue

logger = logging.getLogger(__name__)

INTERNAL = "internal error, the server's log has the details"
_REQUESTS_AWAITED = 16  # calls that the library hands over without being asked for each
_NO_FLAGS = 0


class Status(Exception):
    """Ends a call with something else than its answer."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class ClientGone(Exception):
    """Nobody reads any more; the call is about to be cancelled."""


class Call:
    """One call of a client, as its handler sees it. A client that leaves, or lets its deadline
    pass, cancels that.
    """

    def __init__(self, server: GrpcServer, event: Any) -> None:
        self.metadata: Sequence[tuple[str, str | bytes]] = event.invocation_metadata
        self._server = server
        self._core = event.call
        self._task: asyncio.Task[None] | None = None
        self._watched = False
        self._began_answer = False
        self._gone = False

    def peer(self) -> str:
        """The client's end of the connection."""
        return str(self._core.peer())

    def _start(self, operations: Sequence[Any], tag: Callable[[Any], None] | None) -> None:
        if problem := self._core.start_server_batch(operations, tag):
            raise RuntimeError(f"the library refused an operation of the call: {problem}")

    def _left(self, event: Any) -> None:
        if event.batch_operations[0].cancelled():
            self._gone = True
            if self._task is not None:
                self._task.cancel()

    def _run(self, handler: Awaitable[bytes | None]) -> None:
        event_loop = asyncio.get_running_loop()
        self._server.running.add(self)
        self._task = event_loop.create_task(self._conclude(handler))
        event_loop.call_soon(self._watch_if_running)

    def _watch_if_running(self) -> None:
        """Many answers are there after the handler's first step; those need not be watched over."""
        if not self._watched:
            self._watched = True
            self._start((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._left)

    async def _conclude(self, handler: Awaitable[bytes | None]) -> None:
        try:
            self.end(grpc.StatusCode.OK, "", await handler)
        except Status as status:
            self.end(status.code, status.details)
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED, "")  # for a client that is still there
            raise
        except ClientGone:
            pass
        except Exception:
            logger.exception("gRPC call failed:")
            self.end(grpc.StatusCode.INTERNAL, INTERNAL)
        finally:
            self._server.running.discard(self)

    def end(self, code: grpc.StatusCode, details: str, message: bytes | None = None) -> None:
        if self._gone:
            return
        operations, text = self._answering(message), details.encode("utf-8", "replace")
        operations.append(
            cygrpc.SendStatusFromServerOperation(None, code.value[0], text, _NO_FLAGS)
        )
        if not self._watched:  # the library wants to be asked for it once in every call
            self._watched = True
            operations.append(cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS))
        self._start(operations, None)

    def _answering(self, message: bytes | None) -> list[Any]:
        operations = []
        if not self._began_answer:
            self._began_answer = True
            operations.append(cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS))
        if message is not None:
            operations.append(cygrpc.SendMessageOperation(message, _NO_FLAGS))
        return operations


class UnaryCall(Call):
    """One message, one answer."""

    def begin(self, answer: Callable[[bytes, Call], Awaitable[bytes]]) -> None:
        self._answer = answer
        self._start((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), self._received)

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # too long, or never sent
            self.end(grpc.StatusCode.UNIMPLEMENTED, "the call takes exactly one message")
            return
        self._run(self._answer(message, self))


class StreamCall(Call):
    """Any number of messages both ways: `async for` gives the client's, until it has no more."""

    def begin(self, run: Callable[[StreamCall], Awaitable[None]]) -> None:
        self._run(run(self))

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> bytes:
        if self._gone:  # the library takes no operation of a call whose server is being stopped
            raise StopAsyncIteration
        event = await self._perform([cygrpc.ReceiveMessageOperation(_NO_FLAGS)])
        message: bytes | None = event.batch_operations[0].message()
        if message is None:
            raise StopAsyncIteration
        return message

    async def write(self, message: bytes) -> None:
        """Returns when the message is on its way, and the next one may follow. One at a time."""
        if self._gone or not (await self._perform(self._answering(message))).success:
            raise ClientGone

    async def _perform(self, operations: Sequence[Any]) -> Any:
        done = asyncio.get_running_loop().create_future()

        def complete(event: Any) -> None:
            if not done.done():  # whoever waited may have been cancelled
                done.set_result(event)

        self._start(operations, complete)
        return await done


@dataclass(frozen=True)
class Unary:
    answer: Callable[[bytes, Call], Awaitable[bytes]]


@dataclass(frozen=True)
class Streaming:
    run: Callable[[StreamCall], Awaitable[None]]


Handler = Unary | Streaming


class GrpcServer:
    """Handlers by the path of their call, "/package.Service/Method"; other calls are unimplemented."""

    def __init__(
        self, handlers: Mapping[str, Handler], arguments: Sequence[tuple[str, int]]
    ) -> None:
        self.running: set[Call] = set()
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._queue = CompletionQueue()
        self._core = cygrpc.Server(arguments, False)
        self._core.register_completion_queue(self._queue.core)
        self._started = False

    def add_insecure_port(self, address: str) -> int:
        return _bound(address, self._core.add_http2_port(address.encode()))

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int:
        return _bound(
            address, self._core.add_http2_port(address.encode(), credentials._credentials)
        )

    async def start(self) -> None:
        self._started = True
        self._core.start()
        self._queue.open()
        for _ in range(_REQUESTS_AWAITED):
            self._await_request()

    def _await_request(self) -> None:
        self._core.request_call(self._queue.core, self._queue.core, self._requested)

    def _requested(self, event: Any) -> None:
        if not event.success:
            return  # the server is being stopped
        self._await_request()
        handler = self._handlers.get(event.call_details.method)
        if isinstance(handler, Unary):
            UnaryCall(self, event).begin(handler.answer)
        elif handler is not None:
            StreamCall(self, event).begin(handler.run)
        else:
            Call(self, event).end(grpc.StatusCode.UNIMPLEMENTED, "")

    async def stop(self, grace: float | None) -> None:
        """Takes no more calls. Those under way may end within `grace` seconds; then they are
        cancelled.
        """
        if not self._started:
            return
        self._started = False
        ended = asyncio.Event()
        self._core.shutdown(self._queue.core, lambda event: ended.set())
        try:
            await asyncio.wait_for(ended.wait(), grace or 0)
        except TimeoutError:
            self._core.cancel_all_calls()
            await ended.wait()
        self._core.destroy()
        await self._queue.close()


def _bound(address: str, port: int) -> int:
    if not port:
        raise RuntimeError(f"cannot listen at {address}")
    return port
