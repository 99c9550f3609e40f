"""Errors in OpenAI's format: a status, and an object with a message, a type and a field name."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from slipstream.engine.constraints.guided import FIELD as GUIDE
from slipstream.server.http.exchange import RETRY_AFTER, ClientGone, Exchange, Headers, Refused
from slipstream.server.kserve.errors import (
    Code,
    InferenceError,
    NeedsPrimary,
    QueueFull,
    Unavailable,
)
from slipstream.server.text.chat import BrokenTemplate

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "service_unavailable"}


class ApiError(Exception):
    """An error response. `param` is the request field that caused it."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.headers = headers
        self.code = code or _CODES.get(status)

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def field_error(name: str, problem: str) -> ApiError:
    """Return the error for a field with a wrong value."""
    return ApiError(f"{name} {problem}", name)


def rename_field(name: str, names: Sequence[tuple[str, str]]) -> str:
    """Return the name of a field in another format of the request.

    `names`: regular expressions of the start of a name, and their replacements.
    """
    for pattern, replacement in names:
        renamed = re.sub(rf"^{pattern}", replacement, name)
        if renamed != name:
            return renamed
    return name


def rename_in_error(error: ApiError, names: Sequence[tuple[str, str]]) -> ApiError:
    """Return an error with the name that its field has in another format of the request."""
    if error.param is None:
        return error
    name = rename_field(error.param, names)
    message = error.message
    if message.startswith(error.param):
        message = name + message.removeprefix(error.param)
    return ApiError(message, name, error.status, error.code, error.headers)


async def run_route(
    route: Callable[[Exchange], Awaitable[None]], exchange: Exchange
) -> ApiError | None:
    """Answer a request. Return the error to respond with if the route failed before it responded.

    A client that has disconnected gets no response. The primary front end answers NeedsPrimary.
    """
    try:
        await route(exchange)
    except ClientGone:
        return None
    except NeedsPrimary:
        raise
    except Exception as error:
        if exchange.started:
            raise
        return as_api_error(error, f"{exchange.method} {exchange.path}")
    return None


def as_api_error(error: Exception, where: str, guided_by: str = "") -> ApiError:
    """Convert any exception to an ApiError. Unexpected ones are logged and become a 500.

    `guided_by` is the request field that carried the grammar.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError(error.message, status=error.status)
    if isinstance(error, QueueFull):
        return ApiError(error.message, status=429, headers=(RETRY_AFTER,))
    if isinstance(error, Unavailable):
        return ApiError(error.message, status=503, headers=(RETRY_AFTER,))
    if isinstance(error, BrokenTemplate):
        return ApiError(str(error), status=500)
    if not isinstance(error, InferenceError):
        logger.error("%s failed:", where, exc_info=error)
        return ApiError("internal error, the server's log has the details", status=500)
    # Models use Triton's name of the field that carried the grammar.
    if guided_by and error.message.startswith(GUIDE):
        return field_error(guided_by, error.message.removeprefix(GUIDE))
    return ApiError(error.message, status=400 if error.code is Code.UNSUPPORTED else error.status)
