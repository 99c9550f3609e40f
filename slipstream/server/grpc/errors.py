"""Errors as gRPC tells them: Triton's code and text, and nothing of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from slipstream.server.grpc.transport import Call, Status
from slipstream.server.kserve.access import Access
from slipstream.server.kserve.errors import Code, InferenceError

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
UNREADABLE = "Unable to parse request"


def read_message(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Status(grpc.StatusCode.INTERNAL, UNREADABLE) from None


def answering(
    method: Callable[..., Awaitable[Any]], request: Any, access: Access, api: str
) -> Callable[..., Any]:
    """A unary call whose errors become gRPC's, for those who may call it. Inference also sees the
    call.
    """

    async def answer(data: bytes, call: Call) -> bytes:
        check_access(call, access, api)
        message = read_message(request, data)
        try:
            answered = await (method(message, call) if api == "inference" else method(message))
        except InferenceError as error:
            raise Status(STATUS[error.code], error.message) from None
        return bytes(answered.SerializeToString())

    return answer


def check_access(call: Call, access: Access, api: str) -> None:
    """Raises Status for those who may not."""
    if not access.guarded and api not in access.grpc_restrictions:
        return  # everybody may, so the metadata need not be looked through
    metadata = {key.lower(): value for key, value in call.metadata}

    def header(name: str) -> str | None:
        value = metadata.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    if (refusal := access.refuse_grpc(api, header)) is not None:
        raise Status(_REFUSED[refusal.status], refusal.message)
    access.note_tenant(header)
