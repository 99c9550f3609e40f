"""Triton's gRPC service over the same models that the HTTP endpoints serve.

Calls that are not here are answered UNIMPLEMENTED by the library.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import grpc.aio

from slipstream.repository.roles import Role, role_of
from slipstream.server import logging
from slipstream.server.errors import Code, InferenceError, Unavailable
from slipstream.server.grpc_tensors import EMPTY_FINAL, FINAL, read_request, set_parameters, write_response
from slipstream.server.health import ServerState
from slipstream.server.http import EXTENSIONS, TRITON_VERSION
from slipstream.server.inference import InferRequest, InferResponse
from slipstream.server.protocol import messages
from slipstream.server.registry import ModelRegistry, ModelVersion

# Requests carry whole tensors (adapters, embeddings), far beyond gRPC's own 4 MB.
LARGEST_REQUEST_BYTES = 256 << 20
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_STATUS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
}
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse, written out


def create_grpc_server(registry: ModelRegistry, state: ServerState) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", LARGEST_REQUEST_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # two servers on one port must not look like success
        ]
    )
    server.add_generic_rpc_handlers((_inference_handlers(InferenceService(registry, state)), _health_handlers(state)))
    return server


def _inference_handlers(service: InferenceService) -> grpc.GenericRpcHandler:
    def unary(name: str, method: Callable[[Any], Awaitable[Any]]) -> grpc.RpcMethodHandler:
        request, response = getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response")
        return grpc.unary_unary_rpc_method_handler(_answering(method), request.FromString, response.SerializeToString)

    handlers = {
        "ServerLive": unary("ServerLive", service.server_live),
        "ServerReady": unary("ServerReady", service.server_ready),
        "ModelReady": unary("ModelReady", service.model_ready),
        "ServerMetadata": unary("ServerMetadata", service.server_metadata),
        "ModelMetadata": unary("ModelMetadata", service.model_metadata),
        "ModelInfer": unary("ModelInfer", service.model_infer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            service.model_stream_infer,
            messages.ModelInferRequest.FromString,
            messages.ModelStreamInferResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)


def _answering(method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A unary call whose errors become gRPC's, with Triton's code and text."""

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(request)
        except InferenceError as error:
            await context.abort(_STATUS[error.code], error.message)
        except Exception:
            logging.error(f"gRPC: {traceback.format_exc().rstrip()}")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error, the server's log has the details")

    return call


def _health_handlers(state: ServerState) -> grpc.GenericRpcHandler:
    async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return _SERVING if state.ready else _NOT_SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )


class InferenceService:
    """One method for each call of the protocol."""

    def __init__(self, registry: ModelRegistry, state: ServerState) -> None:
        self._registry = registry
        self._state = state

    async def server_live(self, request: Any) -> Any:
        return messages.ServerLiveResponse(live=self._state.live)

    async def server_ready(self, request: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._state.ready)

    async def model_ready(self, request: Any) -> Any:
        ready = self._registry.is_ready(request.name, _version(request.version))
        return messages.ModelReadyResponse(ready=ready)

    async def server_metadata(self, request: Any) -> Any:
        return messages.ServerMetadataResponse(name="triton", version=TRITON_VERSION, extensions=EXTENSIONS)

    async def model_metadata(self, request: Any) -> Any:
        return messages.ModelMetadataResponse(**self._registry.metadata(request.name, _version(request.version)))

    async def model_infer(self, message: Any) -> Any:
        entry = self._find(message)
        if entry.model.decoupled:
            raise InferenceError(DECOUPLED, Code.UNSUPPORTED)
        request = read_request(message, entry.model.config, entry.version)
        answer = InferResponse()
        async with aclosing(entry.model.infer(request)) as responses:
            async for answer in responses:
                if answer.error is not None:
                    raise answer.error
        return write_response(message, entry.version, answer)

    async def model_stream_infer(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        """Any number of requests, answered side by side. An error is an answer; the stream goes on."""
        writer = _Writer(context)
        async with asyncio.TaskGroup() as answering:  # the client's leaving cancels this call, and so all of them
            ordered: asyncio.Task[None] | None = None
            async for message in requests:
                stream = _AnswerStream(self, message, writer)
                task = answering.create_task(stream.run(after=ordered))
                if stream.keeps_order:
                    ordered = task

    def _find(self, message: Any) -> ModelVersion:
        if self._state.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        return self._registry.find(message.model_name, _version(message.model_version))


def _version(text: str) -> str:
    if text and not (text.isascii() and text.isdecimal()):
        raise InferenceError(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    return text


class _Admitted(NamedTuple):
    entry: ModelVersion
    request: InferRequest


class _Writer:
    """The way out of one stream; gRPC takes one message at a time."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._turn = asyncio.Lock()

    async def __call__(self, **fields: Any) -> None:
        async with self._turn:
            await self._context.write(messages.ModelStreamInferResponse(**fields))


class _AnswerStream:
    """The answers to one request of a stream."""

    def __init__(self, service: InferenceService, message: Any, write: _Writer) -> None:
        self._message = message
        self._write = write
        self._refusal: InferenceError | None = None
        self._admitted: _Admitted | None = None
        try:
            entry = service._find(message)
            self._admitted = _Admitted(entry, read_request(message, entry.model.config, entry.version))
        except InferenceError as error:
            self._refusal = error

    @property
    def keeps_order(self) -> bool:
        """Models that answer exactly once are answered in the order of their requests."""
        return self._admitted is not None and not self._admitted.entry.model.decoupled

    async def run(self, after: asyncio.Task[None] | None) -> None:
        try:
            if self._admitted is None:
                assert self._refusal is not None
                raise self._refusal
            await self._answer(*self._admitted, after if self.keeps_order else None)
        except InferenceError as error:
            response = messages.ModelInferResponse(id=self._message.id)
            await self._write(error_message=error.message, infer_response=response)
        except Exception:
            logging.error(f"gRPC: {traceback.format_exc().rstrip()}")
            await self._write(error_message="internal error, the server's log has the details")

    async def _answer(self, entry: ModelVersion, request: InferRequest, after: asyncio.Task[None] | None) -> None:
        final = False
        separate_end = role_of(entry.model.config) is Role.BLS  # as upstream's BLS models end their streams
        async with aclosing(_with_last(entry.model.infer(request))) as responses:
            async for response, last in responses:
                if after is not None:
                    await asyncio.wait([after])
                final = not entry.model.decoupled or (last and not separate_end)
                await self._send(entry, response, final)
        if not final and request.parameters.get(EMPTY_FINAL) is True:
            await self._send_end(entry)

    async def _send(self, entry: ModelVersion, response: InferResponse, final: bool) -> None:
        version = "" if response.error is not None else entry.version
        message = write_response(self._message, version, response)
        set_parameters(message, [(FINAL, final)])
        error = response.error.message if response.error is not None else ""
        await self._write(error_message=error, infer_response=message)

    async def _send_end(self, entry: ModelVersion) -> None:
        message = messages.ModelInferResponse(model_name=entry.name, id=self._message.id)
        set_parameters(message, [(FINAL, True)])
        await self._write(infer_response=message)


async def _with_last(
    responses: AsyncGenerator[InferResponse, None],
) -> AsyncGenerator[tuple[InferResponse, bool], None]:
    """Each answer and whether it is the last one, as far as that is known without waiting for the engine."""
    async with aclosing(responses):
        upcoming = asyncio.ensure_future(anext(responses, None))
        try:
            while (response := await upcoming) is not None:
                upcoming = asyncio.ensure_future(anext(responses, None))
                await asyncio.sleep(0)  # a model that has nothing more to say ends within this turn
                ended = upcoming.done() and upcoming.exception() is None and upcoming.result() is None
                yield response, ended
        finally:
            if not upcoming.done():
                upcoming.cancel()
                await asyncio.wait([upcoming])
