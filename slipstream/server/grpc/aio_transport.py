"""A gRPC server on `grpc.aio`, the public interface of grpcio; the fallback of `core_transport`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from slipstream.server.grpc.transport import (
    INTERNAL,
    ClientGone,
    Handler,
    Status,
    Streaming,
    Unary,
)

logger = logging.getLogger(__name__)


class AioCall:
    """One call of a client, unary or streaming."""

    def __init__(self, context: Any) -> None:
        self.metadata: Sequence[tuple[str, str | bytes]] = tuple(
            context.invocation_metadata() or ()
        )
        self._context = context
        self._gone = False
        context.add_done_callback(self._end)

    def _end(self, _: Any) -> None:
        self._gone = True

    def peer(self) -> str:
        return str(self._context.peer())

    def __aiter__(self) -> AioCall:
        return self

    async def __anext__(self) -> bytes:
        message = grpc.aio.EOF if self._gone else await self._read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return bytes(message)

    async def _read(self) -> Any:
        try:
            return await self._context.read()
        except grpc.aio.BaseError:  # the call has ended
            return grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        if self._gone:
            raise ClientGone
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise ClientGone from error


class AioServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves handlers by the path of their call."""

    def __init__(
        self, handlers: Mapping[str, Handler], arguments: Sequence[tuple[str, int]]
    ) -> None:
        self.running: set[asyncio.Task[Any]] = set()
        self._handlers = handlers
        self._server = grpc.aio.server(handlers=[self], options=list(arguments))
        self._started = False

    def add_insecure_port(self, address: str) -> int:
        return self._bind(address, lambda: self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int:
        return self._bind(address, lambda: self._server.add_secure_port(address, credentials))

    def _bind(self, address: str, add: Callable[[], int]) -> int:
        try:
            port = add()
        except RuntimeError as error:
            raise RuntimeError(f"cannot listen at {address}") from error
        if not port:
            raise RuntimeError(f"cannot listen at {address}")
        return port

    async def start(self) -> None:
        self._started = True
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        if self._started:
            self._started = False
            await self._server.stop(grace)
            if self.running:  # grpc.aio has cancelled them and does not wait
                await asyncio.wait(self.running)

    def service(self, handler_call_details: Any) -> Any:
        """Return grpc.aio's handler of a call."""
        handler = self._handlers.get(handler_call_details.method)
        if isinstance(handler, Unary):
            return self._unary_handler(handler)
        return self._stream_handler(handler or Streaming(_refuse))

    def _unary_handler(self, handler: Unary) -> Any:
        async def answer(call: AioCall) -> bytes:
            message = await anext(call, None)
            if message is None:  # too long, or never sent
                raise Status(grpc.StatusCode.UNIMPLEMENTED, "the call takes exactly one message")
            return await handler.answer(message, call)

        async def run(_: Any, context: Any) -> bytes | None:
            return await self._conclude(context, answer)

        # of a stream of requests, so that a client which sends none is answered
        return grpc.stream_unary_rpc_method_handler(run)

    def _stream_handler(self, handler: Streaming) -> Any:
        async def run(_: Any, context: Any) -> None:
            await self._conclude(context, handler.run)

        return grpc.stream_stream_rpc_method_handler(run)

    async def _conclude(
        self, context: Any, run: Callable[[AioCall], Awaitable[bytes | None]]
    ) -> bytes | None:
        """Run a handler and end the call with its response or a status."""
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            return await run(AioCall(context))
        except Status as error:
            status = error
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            status = Status(grpc.StatusCode.CANCELLED, "")  # of the handler's own making
        except ClientGone:
            return None
        except Exception:
            logger.exception("gRPC call failed:")
            status = Status(grpc.StatusCode.INTERNAL, INTERNAL)
        finally:
            self.running.discard(task)
        await context.abort(status.code, status.details)
        return None


async def _refuse(call: object) -> None:
    raise Status(grpc.StatusCode.UNIMPLEMENTED, "")
