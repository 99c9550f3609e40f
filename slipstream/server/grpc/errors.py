"""Errors and access checks of gRPC calls: Triton's codes and texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.server.grpc.transport import Call, Status, Unary
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import Code, InferenceError
from slipstream.server.text.threads import in_thread_if_long

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
# Reading bytes of tensors costs less than other work on a request of the same size.
BYTES_PER_SIZE = 16
UNREADABLE = "Unable to parse request"


def read_message(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Status(grpc.StatusCode.INTERNAL, UNREADABLE) from None


def unary_call(
    method: Callable[[Any, Call, int], Awaitable[Any]], request: Any, access: Access, api: str
) -> Unary:
    """Return the handler of a method that takes the message, the call and the message's bytes.

    It checks the access to `api`, reads the message and translates errors to gRPC's. The method
    returns a message, or an encoded one.
    """

    async def answer(data: bytes, call: Call) -> bytes:
        check_access(call, access, api)
        message = await in_thread_if_long(len(data) // BYTES_PER_SIZE, read_message, request, data)
        try:
            response = await method(message, call, len(data))
        except InferenceError as error:
            raise Status(STATUS[error.code], error.message) from None
        return response if isinstance(response, bytes) else bytes(response.SerializeToString())

    return Unary(answer)


def unary_message(
    method: Callable[[Any], Awaitable[Any]], request: Any, access: Access, api: str
) -> Unary:
    """Return the handler of a method that takes only the message."""
    return unary_call(lambda message, call, size: method(message), request, access, api)


def check_access(call: Call, access: Access, api: str) -> None:
    """Raise Status where the client may not use the API."""
    if not access.guarded and api not in access.grpc_restrictions:
        return  # all clients may, so the metadata need not be read
    metadata = {key.lower(): value for key, value in call.metadata}

    def header(name: str) -> str | None:
        value = metadata.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    if (refusal := access.refuse_grpc(api, header)) is not None:
        raise Status(_REFUSED[refusal.status], refusal.message)
    access.note_tenant(header)
