"""Errors as gRPC tells them: Triton's code and text, and nothing of ours."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from slipstream.server import logging
from slipstream.server.access import Access, Refusal
from slipstream.server.errors import Code, InferenceError

STATUS = {
    Code.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
}
_REFUSED = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    503: grpc.StatusCode.UNAVAILABLE,
}
INTERNAL = "internal error, the server's log has the details"
UNREADABLE = "Unable to parse request"


def reading(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A parser of messages; for bytes that are none it gives None, which `answering` tells in Triton's words."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return None

    return read


def answering(method: Callable[..., Awaitable[Any]], access: Access, api: str) -> Callable[[Any, Any], Any]:
    """A unary call whose errors become gRPC's, for those who may call it. Inference also sees the metadata."""

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check_access(context, access, api)
        if request is None:
            await context.abort(grpc.StatusCode.INTERNAL, UNREADABLE)
        try:
            return await (method(request, context) if api == "inference" else method(request))
        except InferenceError as error:
            await context.abort(STATUS[error.code], error.message)
        except Exception:
            logging.error(f"gRPC: {traceback.format_exc().rstrip()}")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)

    return call


async def check_access(context: grpc.aio.ServicerContext, access: Access, api: str) -> None:
    if not access.guarded and api not in access.grpc_restrictions:
        return  # everybody may, so the metadata need not be looked through
    refusal = refused_to(context, access, api)
    if refusal is not None:
        await context.abort(_REFUSED[refusal.status], refusal.message)


def refused_to(context: grpc.aio.ServicerContext, access: Access, api: str) -> Refusal | None:
    metadata = {str(key).lower(): value for key, value in context.invocation_metadata() or ()}

    def header(name: str) -> str | None:
        value = metadata.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    return access.refuse_grpc(api, header)
