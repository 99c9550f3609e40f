"""A gRPC server on the C core of grpcio, driven without `grpc.aio`.

Connections, TLS, flow control, keepalive, compression, deadlines and limits are those of the C
core; `grpc.server` is built on the same layer. `grpc.aio` spends some 200 µs on an empty call,
nearly all of it on the futures and callbacks around every operation. Here an operation is started
with the function that takes its result.

This is the only module that uses private names of grpcio. `transport.TESTED_VERSIONS` bounds its
versions, and importing the module fails if one of the names is missing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc._cython.cygrpc import CompletionQueue as CoreQueue
from grpc._cython.cygrpc import (
    CompletionType,
    ReceiveCloseOnServerOperation,
    ReceiveMessageOperation,
    SendInitialMetadataOperation,
    SendMessageOperation,
    SendStatusFromServerOperation,
    Server,
)

from slipstream.server.grpc.transport import (
    INTERNAL,
    Call,
    ClientGone,
    Handler,
    Status,
    StreamCall,
    Unary,
)

logger = logging.getLogger(__name__)

_QUEUE_EMPTY = CompletionType.queue_timeout
_QUEUE_CLOSED = CompletionType.queue_shutdown
_NO_WAIT = 0  # a deadline that has passed
_EVENTS_PER_TURN = 64  # then the event loop's other work runs first
_REQUESTED_CALLS = 16  # calls that the core may hand over before more are requested
_NO_FLAGS = 0
_CANCEL_SECONDS = 0.5  # longest wait for the end of calls that were cancelled


class CompletionQueue:
    """Passes each completed operation to its tag: a function, or None.

    While there is work, the event loop polls the queue itself: a thread that fetched every event
    would compete with the loop for the interpreter. The thread waits only while the queue is empty,
    and wakes the loop.
    """

    def __init__(self) -> None:
        self.core = CoreQueue()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._empty = threading.Lock()  # held while the event loop polls
        self._empty.acquire()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._wait, name="grpc-events", daemon=True)

    def open(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Close the queue. No operation may be under way."""
        self.core.shutdown()
        await self._closed.wait()
        self._thread.join()

    def _wait(self) -> None:
        assert self._event_loop is not None
        while not self._closed.is_set():
            event = self.core.poll()
            if event.tag is None and event.completion_type != _QUEUE_CLOSED:
                continue
            try:
                self._event_loop.call_soon_threadsafe(self._take, event)
            except RuntimeError:  # the event loop has ended
                return
            self._empty.acquire()

    def _take(self, event: Any = None) -> None:
        assert self._event_loop is not None
        taken = 0
        while taken < _EVENTS_PER_TURN:
            event = event or self.core.poll(_NO_WAIT)
            if event.completion_type == _QUEUE_EMPTY:
                break
            if event.completion_type == _QUEUE_CLOSED:
                self._closed.set()
                self._empty.release()
                return
            _deliver(event)
            event = None
            taken += 1
        if taken:
            self._event_loop.call_soon(self._take)  # what was just begun may be complete soon
        else:
            self._empty.release()


def _deliver(event: Any) -> None:
    if event.tag is None:
        return
    try:
        event.tag(event)
    except Exception:  # an error in one call must not stop the queue
        logger.exception("gRPC call failed:")


class CoreCall:
    """One call of a client. Its handler is cancelled when the client leaves."""

    def __init__(self, server: CoreServer, event: Any) -> None:
        self.metadata: Sequence[tuple[str, str | bytes]] = event.invocation_metadata
        self._server = server
        self._core = event.call
        self._task: asyncio.Task[None] | None = None
        self._watched = False  # the core was asked to report the end of the call
        self._metadata_sent = False
        self._gone = False

    def peer(self) -> str:
        return str(self._core.peer())

    def _start(self, operations: Sequence[Any], tag: Callable[[Any], None] | None) -> None:
        if problem := self._core.start_server_batch(operations, tag):
            raise RuntimeError(f"the C core refused an operation of the call: {problem}")

    def _closed(self, event: Any) -> None:
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
        """Watch for the client's leaving, unless the handler finished in its first step."""
        if not self._watched:
            self._watched = True
            self._start((ReceiveCloseOnServerOperation(_NO_FLAGS),), self._closed)

    async def _conclude(self, handler: Awaitable[bytes | None]) -> None:
        try:
            self.end(grpc.StatusCode.OK, "", await handler)
        except Status as status:
            self.end(status.code, status.details)
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED, "")  # the client may still be there
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
        operations = self._send_operations(message)
        text = details.encode("utf-8", "replace")
        operations.append(SendStatusFromServerOperation(None, code.value[0], text, _NO_FLAGS))
        if not self._watched:  # the core requires this operation once in every call
            self._watched = True
            operations.append(ReceiveCloseOnServerOperation(_NO_FLAGS))
        self._start(operations, None)

    def _send_operations(self, message: bytes | None) -> list[Any]:
        operations: list[Any] = []
        if not self._metadata_sent:
            self._metadata_sent = True
            operations.append(SendInitialMetadataOperation(None, _NO_FLAGS))
        if message is not None:
            operations.append(SendMessageOperation(message, _NO_FLAGS))
        return operations


class CoreUnaryCall(CoreCall):
    """One message, one response."""

    def begin(self, answer: Callable[[bytes, Call], Awaitable[bytes]]) -> None:
        self._answer = answer
        self._start((ReceiveMessageOperation(_NO_FLAGS),), self._received)

    def _received(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # too long, or never sent
            self.end(grpc.StatusCode.UNIMPLEMENTED, "the call takes exactly one message")
            return
        self._run(self._answer(message, self))


class CoreStreamCall(CoreCall):
    """Any number of messages both ways. `async for` yields the client's."""

    def begin(self, run: Callable[[StreamCall], Awaitable[None]]) -> None:
        self._run(run(self))

    def __aiter__(self) -> CoreStreamCall:
        return self

    async def __anext__(self) -> bytes:
        if self._gone:  # the core accepts no operation of a call whose server is being stopped
            raise StopAsyncIteration
        event = await self._perform([ReceiveMessageOperation(_NO_FLAGS)])
        message: bytes | None = event.batch_operations[0].message()
        if message is None:
            raise StopAsyncIteration
        return message

    async def write(self, message: bytes) -> None:
        if self._gone or not (await self._perform(self._send_operations(message))).success:
            raise ClientGone

    async def _perform(self, operations: Sequence[Any]) -> Any:
        done = asyncio.get_running_loop().create_future()

        def complete(event: Any) -> None:
            if not done.done():  # the waiting task may have been cancelled
                done.set_result(event)

        self._start(operations, complete)
        return await done


class CoreServer:
    """Serves handlers by the path of their call, "/package.Service/Method"."""

    def __init__(
        self, handlers: Mapping[str, Handler], arguments: Sequence[tuple[str, int]]
    ) -> None:
        self.running: set[CoreCall] = set()
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._queue = CompletionQueue()
        self._core = Server(arguments, False)
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
        for _ in range(_REQUESTED_CALLS):
            self._request_call()

    def _request_call(self) -> None:
        self._core.request_call(self._queue.core, self._queue.core, self._requested)

    def _requested(self, event: Any) -> None:
        if not event.success:
            return  # the server is being stopped
        self._request_call()
        handler = self._handlers.get(event.call_details.method)
        if isinstance(handler, Unary):
            CoreUnaryCall(self, event).begin(handler.answer)
        elif handler is not None:
            CoreStreamCall(self, event).begin(handler.run)
        else:
            CoreCall(self, event).end(grpc.StatusCode.UNIMPLEMENTED, "")

    async def stop(self, grace: float | None) -> None:
        if not self._started:
            return
        self._started = False
        ended = asyncio.Event()
        self._core.shutdown(self._queue.core, lambda event: ended.set())
        try:
            await asyncio.wait_for(ended.wait(), grace or 0)
        except TimeoutError:
            self._core.cancel_all_calls()
            try:
                await asyncio.wait_for(ended.wait(), _CANCEL_SECONDS)
            except TimeoutError:
                logger.warning("the gRPC server stops although %d calls run", len(self.running))
                return  # the core must not be destroyed while it has calls
        self._core.destroy()
        await self._queue.close()


def _bound(address: str, port: int) -> int:
    if not port:
        raise RuntimeError(f"cannot listen at {address}")
    return port
