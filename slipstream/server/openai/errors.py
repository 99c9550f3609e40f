"""Errors as OpenAI's clients expect them: a status, and an object that says what it is, and about
which field.
"""

from __future__ import annotations

import logging

import msgspec

from slipstream.engine.constraints.guided import FIELD as GUIDE
from slipstream.server.http.access import Refused
from slipstream.server.http.exchange import RETRY_AFTER, Headers
from slipstream.server.kserve.errors import Code, InferenceError, QueueFull, Unavailable

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
    """A request that is answered with an error. `param` is the field it is about."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.headers = message, param, status, headers
        self.code = code or _CODES.get(status)

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def refused(name: str, problem: str) -> ApiError:
    """A field with a value that cannot be."""
    return ApiError(f"{name} {problem}", name)


def as_api_error(error: Exception, where: str, guided_by: str = "") -> ApiError:
    """What a model, or the door, said; what nobody meant to say is for the log. `guided_by`: what a
    guide came in.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError(error.message, status=error.status)
    if isinstance(error, QueueFull):
        return ApiError(error.message, status=429, headers=(RETRY_AFTER,))
    if isinstance(error, Unavailable):
        return ApiError(error.message, status=503, headers=(RETRY_AFTER,))
    if not isinstance(error, InferenceError):
        logger.error("%s failed:", where, exc_info=error)
        return ApiError("internal error, the server's log has the details", status=500)
    # The models name the guide by their own field; here it came in another.
    if guided_by and error.message.startswith(GUIDE):
        return refused(guided_by, error.message.removeprefix(GUIDE))
    return ApiError(error.message, status=400 if error.code is Code.UNSUPPORTED else error.status)
